"use strict";
// What all parts of the page share: the record, what is chosen, elements, numbers as text.
// Nothing of the record is ever set as HTML: `el` makes text nodes.

const record = JSON.parse(document.getElementById("record").textContent);
const narrow = () => window.innerWidth <= 760;
const state = { compile: 0, graph: 0, section: "overview", nodes: new Set(), step: -1 };
const listeners = [];

function changed(what) { for (const each of listeners) each(what); }

const compileNow = () => record.compiles[state.compile];
const graphNow = () => compileNow().graphs[state.graph];

function el(tag, props, ...children) {
  const made = document.createElement(tag);
  return fill(made, props, children);
}

function svg(tag, props, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  return fill(made, props, children);
}

function fill(made, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) made.style.setProperty(key, each);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    made.append(child instanceof Node ? child : String(child));
  }
  return made;
}

// --- numbers ---------------------------------------------------------------------------------------------------------

function scaled(value, units, base) {
  let place = 0, size = Math.abs(value);
  while (size >= base && place < units.length - 1) { size /= base; value /= base; place += 1; }
  const digits = place === 0 ? 0 : Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0;
  return `${value.toFixed(digits)} ${units[place]}`;
}

const bytesText = (value) => value === null || value === undefined ? "–" : scaled(value, ["B", "KiB", "MiB", "GiB", "TiB"], 1024);
const countText = (value) => value === null || value === undefined ? "–" : scaled(value, ["", "k", "M", "G", "T", "P"], 1000).trim();
const rateText = (value, unit) => scaled(value, ["", "k", "M", "G", "T", "P"].map((each) => each + unit), 1000);
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

function secondsText(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1) return `${value.toFixed(2)} s`;
  if (value >= 1e-3) return `${(value * 1e3).toFixed(value >= 0.1 ? 0 : 1)} ms`;
  return `${(value * 1e6).toFixed(1)} µs`;
}

// --- places in the model ---------------------------------------------------------------------------------------------

const baseName = (path) => path.split(/[\\/]/).pop();

function placeText(number) {
  const place = record.places[number];
  if (!place) return "";
  const file = place.file >= 0 ? baseName(record.files[place.file].path) : "line";
  return `${file}:${place.line}`;
}

function placeButton(number, withText) {
  const place = record.places[number];
  if (!place) return el("span", { class: "dim" }, "–");
  const text = withText && place.text ? `${placeText(number)}  ${place.text}` : placeText(number);
  return el("button", { class: withText ? "place long" : "place", title: place.text, onclick: (event) => { event.stopPropagation(); showPlace(number); } }, text);
}

const placeButtons = (numbers) => numbers.slice(0, 3).flatMap((each, place) => [place ? ", " : "", placeButton(each)]);

// Nodes of a graph by the place they come from, made once for each graph.
const byPlace = new WeakMap();
function nodesByPlace(graph) {
  if (!byPlace.has(graph)) {
    const found = new Map();
    graph.nodes.forEach((node, number) => {
      if (node.place < 0) return;
      if (!found.has(node.place)) found.set(node.place, []);
      found.get(node.place).push(number);
    });
    byPlace.set(graph, found);
  }
  return byPlace.get(graph);
}

const namesOf = new WeakMap();
function nodeNumbers(graph) {
  if (!namesOf.has(graph)) namesOf.set(graph, new Map(graph.nodes.map((node, number) => [node.name, number])));
  return namesOf.get(graph);
}

// --- choosing --------------------------------------------------------------------------------------------------------

function select(nodes, from) {
  state.nodes = new Set(nodes);
  changed({ selection: true, from });
}

function go(section, more) {
  Object.assign(state, more || {});
  if (more && ("graph" in more || "compile" in more)) state.nodes = more.nodes || new Set();
  state.section = section;
  changed({ section: true });
}

// The first graph of the compilation that has code.
function graphWithCode() {
  const graphs = compileNow().graphs;
  if (graphs[state.graph] && graphs[state.graph].steps.length) return state.graph;
  const found = graphs.findIndex((graph) => graph.steps.length);
  return found < 0 ? Math.max(0, graphs.length - 1) : found;
}

function showPlace(number) {
  let graph = state.graph;
  if (!nodesByPlace(graphNow()).has(number)) {
    const other = compileNow().graphs.findIndex((each) => each.nodes.length && nodesByPlace(each).has(number));
    if (other >= 0) graph = other;
  }
  const nodes = new Set(nodesByPlace(compileNow().graphs[graph]).get(number) || []);
  go("code", { graph, nodes });
  revealPlace(number);
}

function showNodes(nodes) {
  state.nodes = new Set(nodes);
  go("code");
}

function table(columns, rows, empty) {
  if (!rows.length) return el("p", { class: "dim" }, empty || "Nothing.");
  return el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, columns.map((each) => el("th", { class: each.startsWith("#") ? "num" : null }, each.replace(/^#/, ""))))),
    el("tbody", {}, rows.map((row) => row instanceof Node ? row : tableRow(columns, row)))));
}

function tableRow(columns, cells, props) {
  return el("tr", props, cells.map((cell, place) => el("td", { class: columns[place].startsWith("#") ? "num" : null }, cell)));
}

// A long name breaks at its joints, before it breaks anywhere.
const jointed = (text) => String(text).split(/(?<=[._(,/=])/).flatMap((part, place) => place ? [el("wbr"), part] : [part]);
const mono = (text) => el("span", { class: "mono" }, jointed(text));

const card = (title, ...content) => el("section", { class: "card" }, el("h2", {}, title), content);
const wideCard = (title, ...content) => el("section", { class: "card wide" }, el("h2", {}, title), content);
