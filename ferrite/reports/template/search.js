// Search over everything of the compilation that is shown: made into a list when it is first asked for.

const GROUPS = 14, EACH = 12;
const indexes = new WeakMap();

function searchIndex(compile) {
  if (indexes.has(compile)) return indexes.get(compile);
  const found = [];
  const add = (group, text, act) => { if (text) found.push({ group, text, low: text.toLowerCase(), act }); };
  const used = new Set(compile.graphs.flatMap((graph) => graph.nodes.map((node) => node.place)));
  record.files.forEach((file, number) => {
    const places = new Map(record.places.map((place, each) => [place, each]).filter(([place, each]) => place.file === number && used.has(each)).map(([place, each]) => [place.line, each]));
    if (places.size) file.lines.forEach((text, line) => add(`model: ${baseName(file.path)}`, text.trim(), () => { const place = places.get(file.first + line); place === undefined ? showLine(number, file.first + line) : showPlace(place); }));
  });
  compile.graphs.forEach((graph, graphNumber) => {
    const inGraph = (more) => ({ graph: graphNumber, ...more });
    graph.nodes.forEach((node, number) => add(`${graph.title}: nodes`, graph.rows[node.row], () => go("code", inGraph({ nodes: new Set([number]) }))));
    graph.texts.forEach((text) => text.lines.forEach((line, place) => add(`${graph.title}: ${text.title}`, line.trim(), () => {
      go("code", inGraph({ nodes: new Set(graph.sets[text.marks[place]] || []) }));
    })));
    graph.passes.forEach((pass, number) => {
      const act = () => { passNow = number; go("passes", inGraph({})); };
      add(`${graph.title}: passes`, pass.name, act);
      for (const [rule, count] of Object.entries(pass.rewrites)) add(`${graph.title}: rules`, `${rule} ${count}× in ${pass.name}`, act);
    });
    graph.near_misses.forEach((each) => add(`${graph.title}: near misses`, `${each.rule}: ${each.reason}`, () => go("passes", inGraph({}))));
    graph.steps.forEach((step, number) => add(`${graph.title}: steps`, `${step.title}${step.reason ? ` – ${step.reason}` : ""}`, () => go("fusion", inGraph({ step: number }))));
    graph.not_fused.forEach((each) => add(`${graph.title}: not fused`, `${each.nodes.join(", ")} with ${each.group.slice(0, 4).join(", ")}: ${each.reason}`, () => {
      const number = nodeNumbers(graph).get(each.nodes[0]);
      go("fusion", inGraph({ step: graph.steps.findIndex((step) => step.nodes.includes(number)) }));
    }));
    if (graph.memory) graph.memory.held.forEach((each) => add(`${graph.title}: memory`, `${each.name} ${each.what} ${bytesText(each.bytes)}`, () => { memoryStep = each.first; go("memory", inGraph({})); }));
  });
  compile.tuning.forEach((each) => add("tuning", `${each.problem}: ${each.configuration}`, () => go("tuning")));
  compile.guards.forEach((each) => add("guards", each, () => go("guards")));
  compile.cache.forEach((each) => add("cache", `${each.what}: ${each.result} ${each.reason} ${each.differences.map((one) => one.name).join(", ")}`, () => go("cache")));
  record.breaks.forEach((each) => add("graph breaks", each.reason, () => go("guards")));
  Object.entries(compile.options).forEach(([name, value]) => add("options", `${name} = ${JSON.stringify(value)}`, () => go("overview")));
  indexes.set(compile, found);
  return found;
}

function showLine(file, line) {
  go("code");
  const model = listings.model;
  if (!model) return;
  for (let place = 0; place < model.source.count; place += 1) {
    if (model.source.number(place) === line && model.source.text(place) === record.files[file].lines[line - record.files[file].first]) { model.cursor = place; requestAnimationFrame(() => model.reveal(place)); return; }
  }
}

function setUpSearch() {
  const input = document.getElementById("search"), box = document.getElementById("found");
  let hits = [], chosen = 0;
  const close = () => { box.hidden = true; };
  const take = (number) => { const hit = hits[number]; if (hit) { close(); input.blur(); hit.act(); } };
  const mark = () => box.querySelectorAll(".hit").forEach((each, number) => { each.setAttribute("aria-selected", String(number === chosen)); if (number === chosen) each.scrollIntoView({ block: "nearest" }); });
  const find = () => {
    const wanted = input.value.trim().toLowerCase();
    if (!wanted) { close(); return; }
    const groups = new Map();
    let total = 0;
    for (const each of searchIndex(compileNow())) {
      if (!each.low.includes(wanted)) continue;
      total += 1;
      if (!groups.has(each.group)) { if (groups.size >= GROUPS) continue; groups.set(each.group, []); }
      const members = groups.get(each.group);
      if (members.length < EACH) members.push(each);
    }
    hits = []; chosen = 0;
    const rows = [];
    for (const [name, members] of groups) {
      rows.push(el("div", { class: "group" }, name));
      for (const each of members) {
        const number = hits.push(each) - 1, at = each.low.indexOf(wanted), start = Math.max(0, at - 40);
        rows.push(el("button", { class: "hit", role: "option", tabindex: -1, "aria-selected": "false", onclick: () => take(number) },
          start ? "…" : "", each.text.slice(start, at), el("mark", {}, each.text.slice(at, at + wanted.length)), each.text.slice(at + wanted.length, at + 160)));
      }
    }
    rows.unshift(el("div", { class: "group" }, total ? `${total.toLocaleString("en")} found` : "nothing found"));
    box.replaceChildren(...rows);
    box.hidden = false;
    mark();
  };
  let waiting = 0;
  input.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(find, 60); });
  input.addEventListener("focus", () => { if (input.value) find(); });
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") { chosen = Math.max(0, Math.min(hits.length - 1, chosen + (event.key === "ArrowDown" ? 1 : -1))); mark(); event.preventDefault(); }
    else if (event.key === "Enter") { clearTimeout(waiting); if (box.hidden) find(); take(chosen); }
    else if (event.key === "Escape") { close(); input.blur(); }
    event.stopPropagation();
  });
  document.addEventListener("click", (event) => { if (!event.target.closest(".finder")) close(); });
}
