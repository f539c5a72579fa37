// Fusion, memory and time: pictures of the steps.

const STEP = 60;

function fusionSection(main) {
  const graph = graphNow();
  main.classList.add("fill");
  const steps = graph.steps;
  const box = el("div", { class: "steps", tabindex: 0, role: "listbox", "aria-label": "steps in order" });
  const space = el("div", { style: { height: `${steps.length * STEP + 12}px`, position: "relative" } });
  const arcs = svg("svg", { class: "arcs", width: 96, "aria-hidden": "true" });
  const side = el("div", { class: "card", style: { overflow: "auto" } });
  space.append(arcs);
  box.append(space);
  const users = steps.map(() => []);
  steps.forEach((step, number) => step.reads.forEach((each) => users[each].push(number)));
  const left = () => narrow() ? 40 : 96;
  const draw = () => {
    const first = Math.max(0, Math.floor(box.scrollTop / STEP) - 4);
    const last = Math.min(steps.length, first + Math.ceil((box.clientHeight || 600) / STEP) + 8);
    const cards = [];
    for (let number = first; number < last; number += 1) cards.push(stepCard(graph, number, () => { state.step = number; state.nodes = new Set(steps[number].nodes); draw(); about(); }));
    const top = Math.max(0, (first - 1) * STEP), height = (last - first + 2) * STEP, middle = (number) => number * STEP + 32 - top;
    const paths = [];
    for (let number = first; number < last; number += 1) for (const each of steps[number].reads) paths.push([each, number]);
    for (let number = Math.max(0, first - 200); number < first; number += 1) for (const user of users[number]) if (user >= last) paths.push([number, user]);
    arcs.setAttribute("height", String(height));
    arcs.style.top = `${top}px`;
    arcs.replaceChildren(...paths.map(([from, to]) => {
      const reach = Math.min(left() - 12, 8 + 16 * Math.log2(1 + to - from)), on = state.step === from || state.step === to;
      return svg("path", { class: on ? "on" : "", d: `M${left()} ${middle(from) + 6} C ${left() - reach * 1.3} ${middle(from) + 6}, ${left() - reach * 1.3} ${middle(to) - 6}, ${left()} ${middle(to) - 6}` });
    }));
    space.replaceChildren(arcs, ...cards);
  };
  const about = () => side.replaceChildren(...stepAbout(graph, users));
  box.addEventListener("scroll", draw);
  box.addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
    if (!move) { if (event.key === "Enter" && state.step >= 0) showNodes(steps[state.step].nodes); return; }
    state.step = Math.min(steps.length - 1, Math.max(0, state.step + move));
    state.nodes = new Set(steps[state.step].nodes);
    if (state.step * STEP < box.scrollTop || (state.step + 1) * STEP > box.scrollTop + box.clientHeight) box.scrollTop = state.step * STEP - box.clientHeight / 2;
    draw(); about(); event.preventDefault();
  });
  if (!steps.length) { main.append(card("Fusion", el("p", { class: "dim" }, "This graph has no steps of its own: choose one that was compiled."))); return; }
  main.append(el("div", { class: "split", style: { "grid-template-columns": narrow() ? "1fr" : "1fr minmax(300px, 36%)" } }, box, side));
  if (state.step >= steps.length) state.step = -1;
  requestAnimationFrame(() => { if (state.step >= 0) box.scrollTop = state.step * STEP - box.clientHeight / 3; draw(); });
  about();
}

function stepCard(graph, number, choose) {
  const step = graph.steps[number];
  const names = step.nodes.map((node) => graph.nodes[node]?.name).filter(Boolean);
  const lit = step.nodes.some((node) => state.nodes.has(node));
  const meta = [step.seconds !== null && step.seconds !== undefined ? secondsText(step.seconds) : "", step.bytes ? bytesText(step.bytes) : "", step.region !== null && step.kind === "kernel" ? `together ${step.region}` : ""].filter(Boolean).join(" · ");
  return el("div", { class: `step${lit ? " lit" : ""}${state.step === number ? " chosen" : ""}`, style: { top: `${number * STEP + 6}px` }, role: "option", "aria-selected": String(state.step === number), "data-step": number, onclick: choose },
    el("div", { class: "line1" }, el("span", { class: `badge ${step.kind}` }, step.kind === "kernel" ? `kernel ${step.kernel >= 0 ? step.kernel : ""}` : step.kind === "template" ? "torch" : step.kind), el("b", {}, step.title), el("span", { class: "meta" }, meta)),
    el("div", { class: "line2" }, names.slice(0, 24).map((name) => el("span", { class: "chip" }, name)), names.length > 24 ? el("span", { class: "dim" }, `and ${names.length - 24} more`) : null, step.reason ? el("span", { class: "dim" }, step.reason) : null));
}

function stepAbout(graph, users) {
  const step = graph.steps[state.step];
  if (!step) {
    const reasons = new Map();
    for (const each of graph.not_fused) reasons.set(each.reason, (reasons.get(each.reason) || 0) + 1);
    return [el("h2", {}, "Which operations are in which kernel"), el("p", { class: "dim" }, "From top to bottom as they run. Lines at the left lead from what makes a value to what reads it. Choose a step to see why it is not one with its neighbours."),
      el("h3", {}, "Why operations were not fused"), table(["because", "#times"], [...reasons].sort((one, other) => other[1] - one[1]).map(([reason, count]) => [reason, count]), "Nothing was held apart.")];
  }
  const names = new Set(step.nodes.map((node) => graph.nodes[node]?.name));
  const apart = graph.not_fused.filter((each) => each.nodes.some((name) => names.has(name)) || each.group.some((name) => names.has(name)));
  const link = (number) => el("button", { class: "place", onclick: () => { state.step = number; state.nodes = new Set(graph.steps[number].nodes); changed({ section: true }); } }, `${graph.steps[number].title}`);
  const list = (numbers) => numbers.length ? numbers.slice(0, 12).flatMap((each, place) => [place ? ", " : "", link(each)]) : "–";
  return [
    el("h2", {}, step.title), el("p", {}, step.places.slice(0, 6).map((each) => el("div", {}, placeButton(each, true)))),
    step.reason ? el("p", {}, `Runs in torch: ${step.reason}`) : null,
    table(["", ""], [["reads from", list(step.reads)], ["read by", list(users[state.step])], ["moves", bytesText(step.bytes)], ["computes", step.flops ? `${countText(step.flops)} operations` : "–"], ["time", step.seconds === null || step.seconds === undefined ? "not measured (--measure)" : `${secondsText(step.seconds)}, ${plural(step.calls, "call")}`]]),
    el("p", {}, el("button", { onclick: () => showNodes(step.nodes) }, "Show its code")),
    el("h3", {}, "Why it is not one with others"), table(["with", "because"], apart.slice(0, 60).map((each) => [el("span", { class: "mono" }, (each.nodes.some((name) => names.has(name)) ? each.group : each.nodes).slice(0, 5).join(", ")), each.reason]), "It was held against no other, or is one with all it was."),
  ];
}

// --- memory ----------------------------------------------------------------------------------------------------------

let memoryStep = -1;

function memorySection(main) {
  const graph = graphNow(), memory = graph.memory;
  if (!memory || !memory.by_step.length) {
    main.append(card("Memory", el("p", {}, memory && memory.peak !== null ? `At most ${bytesText(memory.peak)} beyond the inputs; eager ${bytesText(memory.eager)}.` : "Sizes are known only when it runs, or this graph has no plan.")));
    return;
  }
  const peakStep = memory.by_step.reduce((best, bytes, step) => bytes > memory.by_step[best] ? step : best, 0);
  if (memoryStep < 0 || memoryStep >= memory.by_step.length) memoryStep = peakStep;
  const holders = memory.held.filter((each) => each.first <= memoryStep && each.last >= memoryStep).sort((one, other) => (one.within ? 1 : 0) - (other.within ? 1 : 0) || other.bytes - one.bytes);
  const most = holders.reduce((greatest, each) => Math.max(greatest, each.bytes), 1);
  const choose = (step) => { memoryStep = Math.max(0, Math.min(memory.by_step.length - 1, step)); changed({ section: true }); };
  main.append(el("div", { class: "facts" },
    el("div", { class: "fact" }, el("b", {}, bytesText(memory.peak)), el("span", {}, "at the peak, beyond the inputs")),
    el("div", { class: "fact" }, el("b", {}, bytesText(memory.eager)), el("span", {}, "eager's peak")),
    el("div", { class: "fact" }, el("b", {}, `${memoryStep}`), el("span", {}, memoryStep === peakStep ? "the step of the peak" : "the step looked at"))),
  card("Bytes over the steps", memoryChart(memory, peakStep, choose), el("p", { class: "dim" }, "Click a step, or move with the arrow keys while the picture has the focus. Below zero: inputs that nobody else holds are freed as well.")),
  el("div", { style: { height: "14px" } }),
  card(`Who holds what at step ${memoryStep}: ${memory.steps[memoryStep]}`, table(["memory", "made by", "#bytes", "from step", "", "line"], holders.slice(0, 300).map((each) => [
    [mono(each.name), each.within ? el("span", { class: "dim" }, ` in ${each.within}`) : null], mono(each.what), bytesText(each.bytes), `${each.first} to ${each.last}`, el("div", { class: "bar", style: { width: `${Math.max(2, (140 * Math.max(0, each.bytes)) / most)}px` } }), placeButton(each.place)]), "Nothing beyond the inputs.")));
}

function memoryChart(memory, peakStep, choose) {
  const width = 1000, height = 240, count = memory.by_step.length, most = memory.by_step.reduce((one, other) => Math.max(one, other), memory.eager || 1), least = memory.by_step.reduce((one, other) => Math.min(one, other), 0);
  const x = (step) => 60 + (step * (width - 80)) / Math.max(1, count), y = (bytes) => 14 + (1 - (bytes - least) / (most - least)) * (height - 44);
  let path = `M${x(0)} ${y(0)}`;
  memory.by_step.forEach((bytes, step) => { path += ` L${x(step)} ${y(bytes)} L${x(step + 1)} ${y(bytes)}`; });
  path += ` L${x(count)} ${y(0)} Z`;
  const marks = [0, 0.25, 0.5, 0.75, 1].map((part) => part * most).concat(least < -most / 20 ? [least] : []);
  const lines = marks.map((bytes) => [svg("line", { class: "axis", x1: 60, x2: width - 20, y1: y(bytes), y2: y(bytes) }), svg("text", { x: 54, y: y(bytes) + 4, "text-anchor": "end" }, bytesText(bytes))]);
  const chart = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": "bytes held over the steps" },
    lines, svg("path", { class: "area", d: path }),
    memory.eager ? [svg("line", { class: "eager", x1: 60, x2: width - 20, y1: y(memory.eager), y2: y(memory.eager) }), svg("text", { x: width - 22, y: y(memory.eager) - 4, "text-anchor": "end" }, "eager's peak")] : null,
    svg("line", { class: "at", x1: x(memoryStep + 0.5), x2: x(memoryStep + 0.5), y1: 14, y2: height - 30 }),
    svg("text", { x: x(0), y: height - 8 }, "step 0"), svg("text", { x: width - 20, y: height - 8, "text-anchor": "end" }, `step ${count - 1}`));
  chart.addEventListener("click", (event) => {
    const box = chart.getBoundingClientRect();
    choose(Math.floor((((event.clientX - box.left) / box.width) * width - 60) / ((width - 80) / Math.max(1, count))));
  });
  chart.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) { choose(memoryStep + move); document.querySelector("main .chart")?.focus(); event.preventDefault(); event.stopPropagation(); }
  });
  return chart;
}

// --- time ------------------------------------------------------------------------------------------------------------

function timeSection(main) {
  const compile = compileNow(), graph = graphNow();
  const measured = graph.steps.map((step, number) => ({ step, number })).filter(({ step }) => step.seconds !== null && step.seconds !== undefined).sort((one, other) => other.step.seconds - one.step.seconds);
  const total = measured.reduce((sum, { step }) => sum + step.seconds, 0);
  const passes = compile.graphs.flatMap((each) => each.passes.map((pass) => ({ pass, title: each.title }))).sort((one, other) => other.pass.seconds - one.pass.seconds).slice(0, 15);
  const columns = ["step", "", "#time", "#share", "#bytes", "#bytes a second", "#operations a second", "#of the limit", "from"];
  main.append(el("div", { class: "grid" },
    measured.length ? wideCard("Roofline", el("p", { class: "dim" }, "Each circle is a kernel or a call; its area is its time. The line is what this machine can do at most: a copy's bytes, a matrix product's operations. What lies in a cache may be above it."), rooflineChart(graph, measured, total)) : null,
    el("section", { class: "card wide" }, el("h2", {}, "Kernels and calls", measured.length ? el("span", { class: "dim" }, ` – ${secondsText(total)} in all`) : null),
      measured.length ? table(columns, measured.slice(0, 500).map(({ step, number }) => {
        const limit = limitOf(graph, step);
        return tableRow(columns, [mono(step.title), el("span", { class: `badge ${step.kind}` }, step.kind === "template" ? "torch" : step.kind), secondsText(step.seconds), `${((100 * step.seconds) / total).toFixed(1)} %`, bytesText(step.bytes),
          step.bytes ? rateText(step.bytes / step.seconds, "B/s") : "–", step.flops ? rateText(step.flops / step.seconds, "op/s") : "–", limit === null ? "–" : `${Math.round(100 * limit)} %`, placeButtons(step.places)],
        { class: "go", tabindex: 0, onclick: () => go("fusion", { step: number }) });
      })) : el("p", { class: "dim" }, "Not measured. To see the time of each kernel and call: python -m ferrite report --measure …, or FERRITE_MEASURE=1.")),
    card("Stages of the compile", stageBars(compile.stages)),
    card("Passes that took longest", table(["pass", "graph", "#time"], passes.map(({ pass, title }) => [mono(pass.name), title, secondsText(pass.seconds)])))));
}

const deviceOf = (graph, step) => step.kernel >= 0 ? graph.kernels[step.kernel].device.split(":")[0] : (graph.kernels[0]?.device || record.limits[0]?.device || "cpu").split(":")[0];

// The part of what is possible that a step reaches: of bytes or of operations, whichever it is nearer to.
function limitOf(graph, step) {
  const limits = record.limits.find((each) => each.device === deviceOf(graph, step));
  if (!limits || !step.seconds) return null;
  return Math.max((step.bytes || 0) / limits.bytes_per_second, (step.flops || 0) / limits.flops_per_second) / step.seconds;
}

function rooflineChart(graph, measured, total) {
  const width = 1000, height = 360, points = measured.filter(({ step }) => step.bytes && step.flops);
  if (!points.length || !record.limits.length) return el("p", { class: "dim" }, "No step has bytes, operations and a limit to compare with.");
  const logs = points.map(({ step }) => Math.log10(step.flops / step.bytes)), rates = points.map(({ step }) => Math.log10(step.flops / step.seconds));
  const roofs = record.limits, peaks = roofs.map((each) => Math.log10(each.flops_per_second)), ridges = roofs.map((each) => Math.log10(each.flops_per_second / each.bytes_per_second));
  const low = Math.floor(Math.min(...logs, -1)), high = Math.ceil(Math.max(...logs, ...ridges) + 0.5), floor = Math.floor(Math.min(...rates)), top = Math.ceil(Math.max(...rates, ...peaks) + 0.2);
  const x = (value) => 64 + ((value - low) / (high - low)) * (width - 90), y = (value) => 12 + (1 - (value - floor) / (top - floor)) * (height - 56);
  const ticks = [];
  for (let each = low; each <= high; each += 1) ticks.push(svg("line", { class: "axis", x1: x(each), x2: x(each), y1: 12, y2: height - 44 }), svg("text", { x: x(each), y: height - 28, "text-anchor": "middle" }, each < 0 ? `1/${10 ** -each}` : String(10 ** each)));
  for (let each = floor; each <= top; each += 1) ticks.push(svg("line", { class: "axis", x1: 64, x2: width - 26, y1: y(each), y2: y(each) }), svg("text", { x: 58, y: y(each) + 4, "text-anchor": "end" }, rateText(10 ** each, "op/s").replace(/\.0+ /, " ")));
  const lines = roofs.map((each, place) => {
    const ridge = Math.min(high, Math.max(low, ridges[place])), start = Math.max(floor, Math.log10(each.bytes_per_second) + low), from = start - Math.log10(each.bytes_per_second);
    return [svg("path", { class: "roof", d: `M${x(from)} ${y(start)} L${x(ridge)} ${y(peaks[place])} L${x(high)} ${y(peaks[place])}` }), svg("text", { x: x(high) - 4, y: y(peaks[place]) - 5, "text-anchor": "end" }, `${each.device}: ${rateText(each.flops_per_second, "op/s")}, ${rateText(each.bytes_per_second, "B/s")}`)];
  });
  return svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "roofline of the steps" }, ticks, lines,
    svg("text", { x: width / 2, y: height - 8, "text-anchor": "middle" }, "operations for each byte"),
    points.slice(0, 2000).reverse().map(({ step, number }) => svg("circle", { class: `dot ${step.kind}`, cx: x(Math.log10(step.flops / step.bytes)), cy: y(Math.log10(step.flops / step.seconds)), r: 3 + 22 * Math.sqrt(step.seconds / total), tabindex: 0, onclick: () => go("fusion", { step: number }) },
      svg("title", {}, `${step.title}: ${secondsText(step.seconds)}, ${bytesText(step.bytes)}, ${countText(step.flops)} operations`))));
}

function timelineChart(graph) {
  const width = 1000, row = 18, spans = graph.collectives, count = Math.max(1, graph.steps.length);
  const x = (step) => 10 + (step * (width - 20)) / count;
  return svg("svg", { class: "chart", viewBox: `0 0 ${width} ${spans.length * row + 26}`, role: "img", "aria-label": "collectives from start to wait" },
    spans.map((each, place) => svg("rect", { class: "span", x: x(each.first), y: place * row + 4, width: Math.max(2, x(each.last + 1) - x(each.first)), height: row - 6, rx: 3, tabindex: 0, onclick: () => go("fusion", { step: each.first }) }, svg("title", {}, `${each.title}: step ${each.first} to ${each.last}`))),
    svg("text", { x: 10, y: spans.length * row + 20 }, "step 0"), svg("text", { x: width - 10, y: spans.length * row + 20, "text-anchor": "end" }, `step ${count - 1}`));
}
