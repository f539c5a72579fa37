// The sections of the page but for the panes: each function fills the main element.

function overviewSection(main) {
  const compile = compileNow();
  for (const note of record.notes) main.append(el("p", { class: "note" }, note));
  const graphs = compile.graphs.filter((graph) => graph.steps.length || graph.failure || graph.host >= 0);
  const sum = (of) => graphs.reduce((total, graph) => total + of(graph), 0);
  const seconds = Object.values(compile.stages).reduce((total, each) => total + each, 0);
  const kernels = sum((graph) => graph.steps.filter((step) => step.kind === "kernel").length);
  const calls = sum((graph) => graph.steps.filter((step) => step.kind === "call" || step.kind === "template").length);
  const peaks = graphs.filter((graph) => graph.memory && graph.memory.peak !== null);
  const peak = Math.max(0, ...peaks.map((graph) => graph.memory.peak));
  const eager = Math.max(0, ...peaks.map((graph) => graph.memory.eager || 0));
  const fact = (value, label, more) => el("div", { class: "fact" }, el("b", {}, value, more ? el("small", {}, ` ${more}`) : null), el("span", {}, label));
  const rewrites = compile.graphs.reduce((total, graph) => total + graph.passes.reduce((count, each) => count + rewritesOf(each), 0), 0);
  main.append(el("div", { class: "facts" },
    fact(graphs.length, plural(graphs.length, "graph").replace(/^\S+ /, ""), graphs.map((graph) => graph.kind).join(", ").slice(0, 40)),
    fact(sum((graph) => graph.operators).toLocaleString("en"), "operations"),
    fact(kernels.toLocaleString("en"), "kernels launched"),
    fact(calls.toLocaleString("en"), "calls of torch"),
    fact(rewrites.toLocaleString("en"), "rewrites"),
    fact(bytesText(peak), eager ? `peak memory, eager ${bytesText(eager)}` : "peak memory"),
    fact(secondsText(seconds), "to compile"),
    record.breaks.length ? fact(record.breaks.length, "graph breaks") : null,
  ));
  const failures = compile.graphs.filter((graph) => graph.failure);
  const eagerCalls = new Map();
  for (const graph of graphs) for (const call of graph.eager_calls) {
    const key = `${call.operator}\n${call.reason}`;
    if (!eagerCalls.has(key)) eagerCalls.set(key, { ...call, count: 0, places: new Set() });
    const each = eagerCalls.get(key);
    each.count += 1;
    if (call.place >= 0) each.places.add(call.place);
  }
  const rows = [...eagerCalls.values()].sort((one, other) => other.count - one.count);
  const rules = new Map();
  for (const graph of compile.graphs) for (const each of graph.passes) for (const [name, count] of Object.entries(each.rewrites)) rules.set(name, (rules.get(name) || 0) + count);
  main.append(el("div", { class: "columns" },
    failures.length ? card("Failures", failures.map((graph) => el("p", { class: "bad" }, `${graph.title}: ${graph.failure}`))) : null,
    card("Where the time of the compile went", stageBars(compile.stages)),
    card("What stays torch's, and why", table(["operator", "#times", "because", "from"],
      rows.slice(0, 100).map((each) => [mono(each.operator), each.count, each.reason || "it is torch's", placeButtons([...each.places])]), "Nothing: every operator is in a kernel.")),
    card("Rewrites", table(["rule", "#times"], [...rules].sort((one, other) => other[1] - one[1]).slice(0, 100).map(([name, count]) => [mono(name), count]), "No rule fired.")),
    compile.saved.length ? card("Kept for the backward graph", table(["how", "operator", "value", "#bytes", "from"],
      compile.saved.slice(0, 200).map((each) => [each.how, mono(each.operator), mono(each.about), bytesText(each.bytes), placeButton(each.place)]))) : null,
    card("This run", aboutTable()),
  ));
  if (record.compiles.length > 1) main.append(card("All compilations", compilesTable()));
}

const rewritesOf = (pass) => Object.values(pass.rewrites).reduce((total, each) => total + each, 0);

function compilesTable() {
  const columns = ["from", "frame", "compiled again because", "#kernels", "#time"];
  return table(columns, record.compiles.map((compile, number) => tableRow(columns, [
    placeButton(compile.place, true), compile.number, compile.recompiled || "", compile.graphs.reduce((total, graph) => total + graph.steps.filter((step) => step.kind === "kernel").length, 0),
    secondsText(Object.values(compile.stages).reduce((total, each) => total + each, 0)),
  ], { class: number === state.compile ? "go chosen" : "go", tabindex: 0, onclick: () => { state.compile = number; state.graph = 0; state.graph = graphWithCode(); go("overview"); } })));
}

function stageBars(stages) {
  const most = Math.max(...Object.values(stages), 1e-9);
  return el("div", { class: "bars" }, Object.entries(stages).flatMap(([name, seconds]) => [
    el("span", {}, name), el("div", { class: "bar", style: { width: `${Math.max(0.5, (100 * seconds) / most)}%` } }), el("span", { class: "dim nowrap" }, secondsText(seconds)),
  ]));
}

function aboutTable() {
  const compile = compileNow();
  const pairs = [
    ...Object.entries(record.versions), ...Object.entries(record.machine),
    ["options", Object.entries(compile.options).map(([name, value]) => `${name}=${JSON.stringify(value)}`).join(", ") || "the defaults"],
    ["command", record.command], ["made", record.made], ["record", `${record.format}, version ${record.version}`],
  ];
  const save = () => {
    const link = el("a", { href: URL.createObjectURL(new Blob([JSON.stringify(record)], { type: "application/json" })), download: "record.json" });
    link.click();
  };
  return [table(["", ""], pairs.map(([name, value]) => [el("span", { class: "dim" }, name), mono(value)])), el("p", {}, el("button", { onclick: save }, "Save the record as JSON"))];
}

// --- passes ----------------------------------------------------------------------------------------------------------

let passNow = -1;

function passesSection(main) {
  const graph = graphNow();
  main.classList.add("fill");
  const changedPasses = graph.passes.map((each, number) => number).filter((number) => (graph.passes[number].hunks || []).length || rewritesOf(graph.passes[number]));
  if (passNow >= graph.passes.length || passNow < 0) passNow = changedPasses[0] ?? 0;
  const list = el("div", { class: "card" });
  const under = el("div", { class: "card" });
  const right = el("div", { class: "side" });
  let stage = null;
  graph.passes.forEach((pass, number) => {
    if (pass.stage !== stage) { stage = pass.stage; list.append(el("div", { class: "stage" }, stage || "passes")); }
    const rewrites = rewritesOf(pass), delta = pass.nodes_after - pass.nodes_before;
    const isChanged = changedPasses.includes(number);
    list.append(el("button", { class: isChanged ? "passrow" : "passrow same", "aria-current": String(number === passNow), onclick: () => { passNow = number; changed({ section: true }); } },
      mono(pass.name), el("span", {}, rewrites ? `${rewrites}×` : "", delta ? ` ${delta > 0 ? "+" : ""}${delta}` : ""), el("span", { class: "dim" }, secondsText(pass.seconds)),
      pass.note ? el("span", { class: "note2" }, pass.note) : null));
  });
  if (!graph.passes.length) list.append(el("p", { class: "dim" }, "No passes ran on this graph."));
  under.append(el("h2", {}, "Near misses"), el("p", { class: "dim" }, "Rules that had a candidate, and did not fire there."),
    table(["rule", "because", "#times", "at"], graph.near_misses.slice(0, 300).map((each) => [mono(each.rule), each.reason, each.count,
      each.places.length ? placeButtons(each.places) : mono(each.nodes.join(", "))]), "No rule came near."));
  const pass = graph.passes[passNow];
  if (pass) {
    const rules = Object.entries(pass.rewrites).map(([name, count]) => `${name} ${count}×`).join(", ");
    const source = pass.hunks ? diffSource(graph, passNow) : { count: 0, text: () => "" };
    const listing = new Listing(source, { label: "what the pass changed", choose: (nodes) => showNodes(nodes) });
    const note = pass.hunks ? (source.count ? "" : " – changed nothing") : " – graphs were not kept: ask for the report before compiling";
    right.append(el("section", { class: "pane", style: { flex: "1" } }, el("header", {}, el("b", {}, pass.name), el("span", { class: "dim" }, `${rules || "no rule fired"} · ${pass.nodes_before} → ${pass.nodes_after} nodes${note}`)), listing.element));
  }
  main.append(el("div", { class: "split" }, el("div", { class: "side" }, list, under), right));
  list.querySelector('[aria-current="true"]')?.scrollIntoView({ block: "nearest" });
}

// The graph before a pass, as numbers of rows.
function graphBefore(graph, number) {
  let rows = graph.first.slice();
  for (const pass of graph.passes.slice(0, number)) rows = applied(rows, pass.hunks || []);
  return rows;
}

function applied(rows, hunks) {
  const made = [];
  let place = 0;
  for (const hunk of hunks) {
    for (; place < hunk.at; place += 1) made.push(rows[place]);
    for (const row of hunk.added) made.push(row);
    place = hunk.at + hunk.removed;
  }
  for (; place < rows.length; place += 1) made.push(rows[place]);
  return made;
}

function diffSource(graph, number) {
  const rows = graphBefore(graph, number), names = nodeNumbers(graph), lines = [];
  const AROUND = 3;
  let last = 0;
  for (const hunk of graph.passes[number].hunks) {
    const from = Math.max(last, hunk.at - AROUND);
    if (from > last) lines.push({ text: `… ${plural(from - last, "line")} as before`, kind: "head" });
    for (let place = from; place < hunk.at; place += 1) lines.push({ row: rows[place], kind: "" });
    for (let place = hunk.at; place < hunk.at + hunk.removed; place += 1) lines.push({ row: rows[place], kind: "removed" });
    for (const row of hunk.added) lines.push({ row, kind: "added" });
    last = hunk.at + hunk.removed;
    const next = graph.passes[number].hunks.find((each) => each.at >= last && each !== hunk);
    const until = Math.min(rows.length, last + AROUND, next ? next.at : rows.length);
    for (; last < until; last += 1) lines.push({ row: rows[last], kind: "" });
  }
  if (lines.length && last < rows.length) lines.push({ text: `… ${plural(rows.length - last, "line")} as before`, kind: "head" });
  const sign = { added: "+ ", removed: "− ", "": "  " };
  return {
    count: lines.length,
    text: (place) => lines[place].text ?? sign[lines[place].kind] + graph.rows[lines[place].row],
    number: () => null,
    kind: (place) => lines[place].kind,
    nodes: (place) => {
      if (lines[place].row === undefined) return null;
      const found = names.get(graph.rows[lines[place].row].split(/[: ]/, 1)[0]);
      return found === undefined ? null : [found];
    },
  };
}

// --- cache, guards, tuning, communication ----------------------------------------------------------------------------

function cacheSection(main) {
  const asked = compileNow().cache;
  main.append(el("div", { class: "grid" }, asked.length ? asked.map((each) => el("section", { class: "card" },
    el("h2", {}, each.what, " ", el("span", { class: `badge ${each.result === "hit" ? "template" : "call"}` }, each.result)),
    el("p", { class: "dim" }, [each.reason, each.entry ? `entry ${each.entry}` : "", each.seconds ? secondsText(each.seconds) : ""].filter(Boolean).join(" · ")),
    each.result === "miss" ? (each.nearest
      ? [el("p", {}, `The nearest older entry, ${each.nearest}, differs in:`), table(["component", "there", "here"], each.differences.map((one) => [one.name, mono(one.there ?? "–"), mono(one.here ?? "–")]))]
      : el("p", {}, "There was no older entry to compare with.")) : null)) : card("The cache", el("p", { class: "dim" }, "It was not asked."))));
}

function guardsSection(main) {
  const compile = compileNow();
  const again = record.compiles.filter((each) => each.recompiled);
  main.append(el("div", { class: "grid" },
    again.length ? null : card("Recompilations", el("p", { class: "dim" }, "No function was compiled twice.")),
    record.breaks.length ? null : card("Graph breaks", el("p", { class: "dim" }, "None: each function is one graph.")),
    again.length ? wideCard("Recompilations", table(["frame", "what failed", "from"], again.map((each) => [each.number, mono(each.recompiled), placeButton(each.place, true)]))) : null,
    record.breaks.length ? wideCard("Graph breaks", table(["where", "#times", "why"], breaksByPlace().map((each) => [placeButton(each.place, true), each.count, breakReason(each.reason)]))) : null,
    wideCard("Guards of this compilation", el("p", { class: "dim" }, compile.number ? `Frame ${compile.number}: checked before each call.` : "Known where a report was asked for before compiling."),
      table(["kind", "of"], compile.guards.map((each) => { const [kind, ...rest] = each.split(" "); return [kind, mono(rest.join(" "))]; }), "None are known."))));
}

// What torch says: what happened, then an explanation, hints and what is for its developers.
function breakReason(text) {
  const [what, ...more] = text.split(/\s+(?=(?:Explanation|Hint|Developer debug context|For more details)\b)/);
  return el("div", { class: "reason" }, el("div", {}, what), more.map((each) => el("div", { class: "dim" }, each)));
}

function breaksByPlace() {
  const found = new Map();
  for (const each of record.breaks) {
    const key = `${each.place} ${each.reason}`;
    found.set(key, { ...each, count: (found.get(key)?.count ?? 0) + 1 });
  }
  return [...found.values()];
}

function tuningSection(main) {
  const columns = ["what", "#torch", "#ours", "#times as fast", "", "ours arranged as"];
  const rows = compileNow().tuning.slice().sort((one, other) => other.torch / other.ours - one.torch / one.ours);
  const most = Math.max(1, ...rows.map((each) => each.torch / each.ours));
  main.append(card("Products and calls that were measured",
    el("p", { class: "dim" }, "Torch's call, and the fastest kernel of ours or a library's, from the record of measurements or measured when a pass first asked. What follows a product element by element may decide for ours where both take as long: it saves a way through memory. Of a product: its type, batch x rows x columns x summed, and along what its factors lie in memory."),
    table(columns, rows.map((each) => {
      const times = each.torch / each.ours;
      return [mono(each.problem), `${each.torch.toFixed(1)} µs`, `${each.ours.toFixed(1)} µs`, el("span", { class: times >= 1 ? "good" : "bad" }, times.toFixed(2)),
        el("div", { class: "bar", style: { width: `${(90 * times) / most}px` } }), mono(each.configuration)];
    }))));
}

function communicationSection(main) {
  const graph = graphNow();
  main.append(card("Collectives over the steps", timelineChart(graph), table(["collective", "#starts at", "#waited for at", "#steps between", "#bytes", "from"], graph.collectives.map((each) => [
    mono(each.title), each.first, each.last, each.last - each.first, bytesText(each.bytes), placeButtons(each.places)]))));
}
