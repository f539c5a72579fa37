// The frame: sections, graphs, keys, light and dark; then the first picture.

const SECTIONS = [
  { name: "overview", title: "Overview", show: overviewSection },
  { name: "code", title: "Code", show: codeSection },
  { name: "passes", title: "Passes", show: passesSection, count: () => graphNow().passes.filter((pass) => rewritesOf(pass)).length },
  { name: "fusion", title: "Fusion", show: fusionSection, count: () => graphNow().steps.length },
  { name: "memory", title: "Memory", show: memorySection },
  { name: "time", title: "Time", show: timeSection },
  { name: "cache", title: "Cache", show: cacheSection, count: () => compileNow().cache.length },
  { name: "guards", title: "Guards & breaks", show: guardsSection, count: () => record.breaks.length + record.compiles.filter((each) => each.recompiled).length },
  { name: "communication", title: "Communication", show: communicationSection, when: () => graphNow().collectives.length },
  { name: "tuning", title: "Tuning", show: tuningSection, when: () => compileNow().tuning.length },
];
const KEYS = [["/", "search"], ["1 … 9", "sections"], ["[  ]", "graph before, graph after"], ["↑ ↓  j k", "move in a listing or picture"], ["← →", "from pane to pane"], ["Enter", "choose: what belongs together lights up"], ["n", "next line that is lit"], ["Escape", "choose nothing"], ["t", "light or dark"], ["?", "this list"]];

const open = () => SECTIONS.filter((each) => !each.when || each.when());

function drawFrame() {
  const compiles = document.getElementById("compiles"), graphs = document.getElementById("graphs"), sections = document.getElementById("sections");
  compiles.replaceChildren(...record.compiles.map((compile, number) => el("option", { value: number, selected: number === state.compile }, `${compile.number ? `[${compile.number}] ` : ""}${compile.title}`)));
  graphs.replaceChildren(...compileNow().graphs.map((graph, number) => el("button", { role: "tab", "aria-selected": String(number === state.graph), onclick: () => { state.graph = number; state.nodes = new Set(); state.step = -1; passNow = -1; memoryStep = -1; changed({ section: true }); } }, graph.title)));
  sections.replaceChildren(...open().map((each) => {
    const count = each.count ? each.count() : 0;
    return el("button", { "aria-current": each.name === state.section ? "page" : null, "data-section": each.name, onclick: () => go(each.name) }, each.title, count ? el("span", { class: "count" }, count.toLocaleString("en")) : null);
  }));
  for (const bar of [graphs, sections]) bar.querySelector("[aria-selected=true], [aria-current=page]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function drawSection() {
  if (!open().some((each) => each.name === state.section)) state.section = "overview";
  drawFrame();
  const main = document.getElementById("main");
  main.className = "";
  main.replaceChildren();
  main.scrollTop = 0;
  listeners.section = null;
  SECTIONS.find((each) => each.name === state.section).show(main);
  keepPlace();
}

function keepPlace() {
  const nodes = [...state.nodes].slice(0, 20).join(".");
  const words = [`c=${state.compile}`, `g=${state.graph}`, `s=${state.section}`, nodes ? `n=${nodes}` : ""].filter(Boolean);
  try { history.replaceState(null, "", `#${words.join("&")}`); } catch { /* a page without an address */ }
}

function readPlace() {
  const words = new Map(location.hash.slice(1).split("&").map((word) => word.split("=")));
  const number = (name, most) => Math.max(0, Math.min(most, parseInt(words.get(name), 10) || 0));
  state.compile = number("c", record.compiles.length - 1);
  state.graph = words.has("g") ? number("g", compileNow().graphs.length - 1) : 0;
  if (!words.has("g")) state.graph = graphWithCode();
  if (SECTIONS.some((each) => each.name === words.get("s"))) state.section = words.get("s");
  if (words.get("n")) state.nodes = new Set(words.get("n").split(".").map(Number).filter((each) => each < graphNow().nodes.length));
}

function setTheme(theme, keep) {
  document.documentElement.dataset.theme = theme;
  if (keep) try { localStorage.setItem("ferrite-theme", theme); } catch { /* pages from disk may keep nothing */ }
  for (const listing of Object.values(listings)) listing.drawRuler();
}

function setUp() {
  let theme = null;
  try { theme = localStorage.getItem("ferrite-theme"); } catch { /* as above */ }
  setTheme(theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"), false);
  const turn = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark", true);
  const keys = document.getElementById("keys");
  keys.append(el("h2", {}, "Keys"), el("dl", {}, KEYS.flatMap(([key, what]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)])), el("button", { onclick: () => keys.close() }, "Close"));
  document.getElementById("theme").addEventListener("click", turn);
  document.getElementById("help").addEventListener("click", () => keys.showModal());
  document.getElementById("compiles").addEventListener("change", (event) => { state.compile = Number(event.target.value); state.graph = 0; state.graph = graphWithCode(); state.nodes = new Set(); state.step = -1; passNow = -1; memoryStep = -1; changed({ section: true }); });
  setUpSearch();
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea") || keys.open) return;
    const digit = "123456789".indexOf(event.key);
    if (event.key === "/") document.getElementById("search").focus();
    else if (event.key === "t") turn();
    else if (event.key === "?") keys.showModal();
    else if (event.key === "Enter" && event.target.matches(".go, .dot, .span")) event.target.dispatchEvent(new MouseEvent("click", { bubbles: true }));
    else if (digit >= 0 && open()[digit]) go(open()[digit].name);
    else if (event.key === "[" || event.key === "]") {
      const count = compileNow().graphs.length;
      state.graph = (state.graph + (event.key === "]" ? 1 : count - 1)) % count;
      state.nodes = new Set(); state.step = -1; passNow = -1; memoryStep = -1;
      changed({ section: true });
    } else if (event.key === "Escape") { state.step = -1; select([]); if (state.section === "fusion") changed({ section: true }); }
    else if ((event.key === "ArrowLeft" || event.key === "ArrowRight") && state.section === "code") {
      const panes = [...document.querySelectorAll(".pane .lines")], now = panes.indexOf(document.activeElement), step = event.key === "ArrowRight" ? 1 : -1;
      panes[(now + step + panes.length) % panes.length]?.focus();
    } else return;
    event.preventDefault();
  });
  listeners.push((what) => { if (what.section) drawSection(); else { if (listeners.section) listeners.section(what); keepPlace(); } });
  let width = narrow();
  window.addEventListener("resize", () => { if (narrow() !== width) { width = narrow(); shown = null; changed({ section: true }); } });
  if (!record.compiles.length) { document.getElementById("main").append(el("p", { class: "note" }, "Nothing was compiled.")); return; }
  readPlace();
  drawSection();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

setUp();
