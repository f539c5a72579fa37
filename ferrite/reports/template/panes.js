// Listings: long texts of which only what can be seen is in the page, linked to the nodes of the graph.

const LINE = 18;
const WORDS = /(#.*$|;(?!@).*$|\/\/.*$)|("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\b(def|return|for|in|with|if|else|elif|while|class|import|from|as|lambda|not|and|or|None|True|False|del|raise|define|declare|call|load|store|br|ret|label|phi|alloca|getelementptr|fadd|fmul|fsub|fdiv)\b|(?<![\w%.])(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)\b|([%@][\w.]+)/g;

function coloured(text) {
  if (text.length > 600) return [text];
  const parts = [];
  let last = 0;
  for (const match of text.matchAll(WORDS)) {
    if (match.index > last) parts.push(text.slice(last, match.index));
    const kind = match[1] ? "c" : match[2] ? "s" : match[3] ? "k" : match[4] ? "d" : "o";
    parts.push(el("span", { class: kind }, match[0]));
    last = match.index + match[0].length;
  }
  if (last < text.length) parts.push(text.slice(last));
  return parts;
}

// A listing of rows: {count, text(i), number(i), kind(i), nodes(i) -> iterable or null, key(i) -> what lights it up}.
class Listing {
  constructor(source, options) {
    this.source = source;
    this.options = options || {};
    this.cursor = -1;
    this.lit = null;
    this.space = el("div", { class: "space", style: { height: `${source.count * LINE}px` } });
    this.lines = el("div", { class: "lines", tabindex: 0, role: "listbox", "aria-label": this.options.label || "text" }, this.space);
    this.ruler = el("canvas", { class: "ruler", "aria-hidden": "true" });
    this.element = el("div", { class: "listing" }, this.lines, this.ruler);
    this.lines.addEventListener("scroll", () => this.draw());
    this.lines.addEventListener("keydown", (event) => this.key(event));
    this.space.addEventListener("click", (event) => {
      if (String(window.getSelection())) return; // somebody marks text
      const place = Math.floor((event.clientY - this.space.getBoundingClientRect().top) / LINE);
      if (place >= 0 && place < source.count) { this.cursor = place; this.choose(); }
    });
    this.ruler.addEventListener("click", (event) => {
      const part = event.offsetY / this.ruler.clientHeight;
      this.lines.scrollTop = part * source.count * LINE - this.lines.clientHeight / 2;
    });
    new ResizeObserver(() => { this.draw(); this.drawRuler(); }).observe(this.element);
  }

  choose() {
    const nodes = this.source.nodes ? this.source.nodes(this.cursor) : null;
    if (nodes && this.options.choose) this.options.choose(nodes, this.cursor);
    else this.draw();
  }

  // Light up rows: `test(i)`; unless the choice came from here, the first that belongs to the fewest nodes is scrolled to.
  light(test, stay) {
    this.lit = test;
    this.places = [];
    if (test) for (let place = 0; place < this.source.count; place += 1) if (test(place)) this.places.push(place);
    if (!stay && this.places.length) {
      const top = this.lines.scrollTop / LINE, bottom = top + this.lines.clientHeight / LINE - 1;
      const size = (place) => this.source.size ? this.source.size(place) : 1;
      const own = this.places.reduce((best, place) => size(place) < size(best) ? place : best);
      if (!this.places.some((place) => place >= top && place <= bottom && size(place) <= size(own))) this.reveal(own);
    }
    this.draw();
    this.drawRuler();
  }

  reveal(place) {
    this.lines.scrollTop = Math.max(0, place * LINE - this.lines.clientHeight / 3);
    this.draw();
  }

  draw() {
    const { source } = this;
    const first = Math.max(0, Math.floor(this.lines.scrollTop / LINE) - 10);
    const last = Math.min(source.count, first + Math.ceil((this.lines.clientHeight || 400) / LINE) + 20);
    if (this.drawn && this.drawn.join() === [first, last, this.cursor].join() && this.drawnLit === this.lit) return;
    this.drawn = [first, last, this.cursor];
    this.drawnLit = this.lit;
    const rows = [];
    for (let place = first; place < last; place += 1) {
      const kind = source.kind ? source.kind(place) : "";
      const linked = source.nodes && source.nodes(place);
      const lit = this.lit && this.lit(place);
      const names = ["row", kind, linked ? "linked" : "", lit ? "lit" : "", place === this.cursor ? "cursor" : ""];
      const number = source.number ? source.number(place) : place + 1;
      rows.push(el("div", { class: names.filter(Boolean).join(" "), role: "option", "aria-selected": lit ? "true" : "false", "data-place": place, style: { top: `${place * LINE}px` } },
        el("span", { class: "n" }, number === null ? "" : number), coloured(source.text(place))));
    }
    this.space.replaceChildren(...rows);
  }

  drawRuler() {
    const { ruler } = this, height = this.element.clientHeight || 1;
    ruler.width = 9; ruler.height = height;
    const pen = ruler.getContext("2d");
    pen.clearRect(0, 0, 9, height);
    pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--lit-edge");
    const whole = Math.max(this.source.count * LINE, height);
    for (const place of this.places || []) pen.fillRect(1, (place * LINE / whole) * height, 7, Math.max(2, (LINE / whole) * height));
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.lines.clientHeight / LINE) - 2);
    const moves = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: page, PageUp: -page, Home: -1e9, End: 1e9 };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in moves) {
      this.cursor = Math.min(this.source.count - 1, Math.max(0, this.cursor + moves[event.key]));
      const top = this.lines.scrollTop, at = this.cursor * LINE;
      if (at < top || at > top + this.lines.clientHeight - 2 * LINE) this.lines.scrollTop = at - this.lines.clientHeight / 2;
      this.draw();
    } else if (event.key === "Enter" || event.key === " ") this.choose();
    else if (event.key === "n" && this.places && this.places.length) {
      this.cursor = this.places.find((place) => place > this.cursor) ?? this.places[0];
      this.reveal(this.cursor);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

// --- what each pane shows --------------------------------------------------------------------------------------------

// Several texts of a graph one behind the other, each behind a headline.
function textsSource(graph, parts) {
  const starts = [];
  let count = 0;
  for (const part of parts) { starts.push(count); count += part.text.lines.length + (part.head ? 1 : 0); }
  const at = (place) => {
    let low = 0, high = parts.length - 1;
    while (low < high) { const middle = (low + high + 1) >> 1; if (starts[middle] <= place) low = middle; else high = middle - 1; }
    return [parts[low], place - starts[low] - (parts[low].head ? 1 : 0)];
  };
  const set = (place) => { const [part, line] = at(place); return line < 0 ? part.set || 0 : part.text.marks[line] || 0; };
  return {
    count,
    text: (place) => { const [part, line] = at(place); return line < 0 ? part.head : part.text.lines[line]; },
    number: (place) => { const [, line] = at(place); return line < 0 ? null : line + 1; },
    kind: (place) => at(place)[1] < 0 ? "head" : "",
    nodes: (place) => { const found = graph.sets[set(place)]; return found && found.length ? found : null; },
    size: (place) => (graph.sets[set(place)] || []).length,
    test: (nodes) => {
      const hit = graph.sets.map((each) => each.some((node) => nodes.has(node)));
      return (place) => hit[set(place)];
    },
    starts,
  };
}

function modelSource(graph) {
  const numbers = new Map(record.places.map((place, number) => [`${place.file}:${place.line}`, number]));
  const nodes = nodesByPlace(graph);
  const used = new Set(compileNow().graphs.flatMap((each) => each.nodes.map((node) => record.places[node.place]?.file)));
  const files = record.files.map((file, number) => ({ file, number })).filter((each) => used.has(each.number) || used.size === 0);
  const starts = [];
  let count = 0;
  for (const each of files) { starts.push(count); count += each.file.lines.length + 1; }
  const at = (place) => {
    let number = files.length - 1;
    while (number > 0 && starts[number] > place) number -= 1;
    return [files[number], place - starts[number] - 1];
  };
  const placeAt = (place) => { const [each, line] = at(place); return line < 0 ? undefined : numbers.get(`${each.number}:${each.file.first + line}`); };
  return {
    count,
    text: (place) => { const [each, line] = at(place); return line < 0 ? each.file.path : each.file.lines[line]; },
    number: (place) => { const [each, line] = at(place); return line < 0 ? null : each.file.first + line; },
    kind: (place) => at(place)[1] < 0 ? "head" : "",
    nodes: (place) => nodes.get(placeAt(place)) || null,
    test: (chosen) => {
      const places = new Set([...chosen].map((node) => graph.nodes[node]?.place));
      return (place) => places.has(placeAt(place) ?? -2);
    },
    lineOf: (number) => {
      const place = record.places[number];
      const index = files.findIndex((each) => each.number === place.file);
      return index < 0 ? -1 : starts[index] + 1 + place.line - files[index].file.first;
    },
  };
}

function graphSource(graph) {
  return {
    count: graph.nodes.length,
    text: (place) => graph.rows[graph.nodes[place].row],
    nodes: (place) => [place],
    test: (nodes) => (place) => nodes.has(place),
  };
}

const texts = (graph, numbers) => numbers.filter((each) => each >= 0).map((each) => ({ text: graph.texts[each] }));

function kernelParts(graph, field) {
  return graph.kernels.map((kernel, number) => ({ kernel, number })).filter(({ kernel }) => kernel[field] >= 0).map(({ kernel, number }) => {
    const text = graph.texts[kernel[field]];
    const times = kernel.launches === 1 ? "" : `, ${kernel.launches} times`;
    const language = field === "code" ? ` · ${kernel.language}` : "";
    return { text, head: `kernel ${number}  ${kernel.name}  on ${kernel.device}${times}${language}`, set: graph.texts[kernel.text].marks[0], number };
  });
}

const PANES = {
  model: { title: "Model", about: "your source", make: modelSource },
  graph: { title: "Graph", about: "after all passes", make: graphSource },
  program: { title: "Loops", about: "the loop program", make: (graph) => textsSource(graph, texts(graph, [graph.program])) },
  kernels: { title: "Kernels", about: "kernel IR, as scheduled", make: (graph) => textsSource(graph, kernelParts(graph, "text")) },
  code: { title: "Code", about: "generated: LLVM or Triton", make: (graph) => textsSource(graph, kernelParts(graph, "code")) },
  host: { title: "Host", about: "the program around the kernels", make: (graph) => textsSource(graph, texts(graph, [graph.host])) },
};
let shown = null;
let listings = {};

function panesThatFit() {
  if (narrow()) return ["model"];
  if (window.innerWidth >= 1500) return ["model", "graph", "program", "kernels", "code"];
  return window.innerWidth >= 1050 ? ["model", "graph", "kernels", "code"] : ["model", "graph", "kernels"];
}

function codeSection(main) {
  const graph = graphNow();
  main.classList.add("fill");
  shown = shown || panesThatFit();
  const says = el("span", { class: "says", "aria-live": "polite" });
  const panes = el("div", { class: "panes" });
  const toggles = Object.entries(PANES).map(([name, pane], place) => el("button", {
    class: "toggle", "aria-pressed": String(shown.includes(name)), "data-pane": name, title: pane.about,
    onclick: () => {
      if (narrow()) shown = [name];
      else shown = shown.includes(name) && shown.length > 1 ? shown.filter((each) => each !== name) : Object.keys(PANES).filter((each) => shown.includes(each) || each === name);
      changed({ section: true });
    },
  }, pane.title));
  main.append(el("div", { class: "panebar" }, toggles, says, el("button", { onclick: () => select([]), title: "Escape" }, "Clear")), panes);
  listings = {};
  for (const name of shown) {
    const pane = PANES[name], source = pane.make(graph);
    const listing = new Listing(source, { label: pane.title, choose: (nodes) => select(nodes, name) });
    listings[name] = listing;
    const empty = source.count ? "" : " – nothing here for this graph";
    panes.append(el("section", { class: "pane", "data-pane": name },
      el("header", {}, el("b", {}, pane.title), el("span", { class: "dim" }, pane.about + empty)), listing.element));
  }
  const update = (what) => {
    const chosen = state.nodes;
    for (const [name, listing] of Object.entries(listings)) {
      listing.light(chosen.size ? listing.source.test(chosen) : null, what && what.from === name);
    }
    says.textContent = selectionText(graph);
  };
  listeners.section = (what) => { if (what.selection) update(what); };
  update();
  if (!state.nodes.size && listings.model) {
    const first = graph.nodes.find((node) => node.place >= 0);
    const line = first ? listings.model.source.lineOf(first.place) : -1;
    if (line >= 0) requestAnimationFrame(() => listings.model.reveal(line));
  }
}

function selectionText(graph) {
  if (!state.nodes.size) return "Click a line, or move with the arrow keys and press Enter: all that belongs to it lights up.";
  const names = [...state.nodes].slice(0, 4).map((node) => graph.nodes[node]?.name).join(", ");
  const steps = graph.steps.filter((step) => step.nodes.some((node) => state.nodes.has(node)));
  const kernels = new Set(steps.filter((step) => step.kernel >= 0).map((step) => step.kernel)).size;
  const calls = steps.filter((step) => step.kernel < 0).length;
  const more = state.nodes.size > 4 ? ` and ${state.nodes.size - 4} more` : "";
  return `${names}${more} · ${plural(kernels, "kernel")} · ${plural(calls, "call")} of torch`;
}

function revealPlace(number) {
  const model = listings.model;
  if (model) { const line = model.source.lineOf(number); if (line >= 0) requestAnimationFrame(() => model.reveal(line)); }
}
