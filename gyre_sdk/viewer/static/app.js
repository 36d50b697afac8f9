// Gyre's viewer: run -> execution -> segment. Read-only. All text from outside goes in as text nodes, never as HTML.
"use strict";

const $ = (id) => document.getElementById(id);
const query = location.search;                         // carries ?token= off loopback
const state = { view: "", run: null, cy: null, graph: null, node: null, sort: ["opened", 1], filter: "" };

function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key === "on") for (const [name, handler] of Object.entries(value)) node.addEventListener(name, handler);
    else if (key === "style") Object.assign(node.style, value);
    else if (key in node && key !== "list") node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined).map((c) => (c instanceof Node ? c : String(c))));
  return node;
}

async function api(path) {
  const answer = await fetch(`api/${path}${query}`);
  if (!answer.ok) throw new Error(`${answer.status} ${(await answer.text()).slice(0, 200)}`);
  return answer.json();
}

const number = (n) => (n === null || n === undefined ? "-" : n >= 1e6 ? (n / 1e6).toFixed(2) + "M" : n >= 1e4 ? (n / 1e3).toFixed(0) + "k" : String(n));
const seconds = (s) => (s === null || s === undefined ? "-" : s >= 5400 ? (s / 3600).toFixed(1) + " h" : s >= 100 ? (s / 60).toFixed(1) + " min" : s.toFixed(1) + " s");
const fixed = (x, d = 3) => (x === null || x === undefined || Number.isNaN(x) ? "-" : Number(x).toFixed(d));
const facts = (pairs) => el("dl", { className: "facts" }, Object.entries(pairs).map(([k, v]) => el("div", {}, el("dt", {}, k), el("dd", {}, v instanceof Node ? v : v ?? "-"))));

function crumbs(...parts) {
  $("crumbs").replaceChildren(...parts.flatMap(([text, href], i) => [i ? " / " : "", href ? el("a", { href }, text) : text]));
  document.title = ["gyre", ...parts.map(([text]) => text)].join(" · ");
}

// ---- run ------------------------------------------------------------------------------------------------------------

const rewardOf = (x) => (x.sealed === null ? ["running", "dim"] : x.valid ? [fixed(x.reward, 2), x.reward > 0 ? "good" : "warn"] : [`invalid: ${x.failure || x.status}`, "bad"]);

function lane(x, from, to) {
  const scale = 100 / Math.max(to - from, 1e-9);
  const box = el("div", { className: "lane", title: `${x.calls} calls` });
  const bar = (start, end, className) => box.append(el("i", { className, style: { left: (start - from) * scale + "%", width: Math.max((end - start) * scale, 0) + "%" } }));
  bar(x.opened, x.sealed ?? to, "wait");
  for (const [start, end] of x.spans) bar(start, end ?? to, "call");
  for (const at of x.moves) box.append(el("i", { className: "move", title: "moved between cells", style: { left: (at - from) * scale + "%" } }));
  if (x.deadline) box.append(el("i", { className: "late", title: "deadline", style: { left: Math.min((x.deadline - from) * scale, 100) + "%" } }));
  return box;
}

const COLUMNS = [
  ["execution", (x) => x.id], ["task", (x) => x.task], ["group", (x) => x.group], ["reward", (x) => (x.valid ? x.reward : -1)], ["status", (x) => x.status || "running"],
  ["calls", (x) => x.calls], ["branches", (x) => x.branches], ["tokens", (x) => x.tokens], ["sampled", (x) => x.sampled], ["time", (x) => (x.sealed ?? Date.now() / 1000) - x.opened],
];

function executionTable(run) {
  const [key, way] = state.sort;
  const sorter = (COLUMNS.find(([name]) => name === key) || ["opened", (x) => x.opened])[1];
  const rows = run.executions.filter((x) => `${x.id} ${x.task} ${x.group} ${x.status} ${x.message}`.toLowerCase().includes(state.filter));
  rows.sort((a, b) => way * (sorter(a) < sorter(b) ? -1 : sorter(a) > sorter(b) ? 1 : 0));
  const from = Math.min(...run.executions.map((x) => x.opened)), to = Math.max(...run.executions.map((x) => x.sealed ?? Date.now() / 1000));
  const head = el("tr", {}, COLUMNS.map(([name]) => el("th", { on: { click: () => { state.sort = [name, state.sort[0] === name ? -state.sort[1] : 1]; drawRun(); } } }, name)), el("th", {}, "timeline"));
  const body = rows.slice(0, 2000).map((x) => {
    const [word, className] = rewardOf(x);
    const cells = [x.id, x.task, x.group, el("span", { className }, word), x.status || "running", x.calls, x.branches, number(x.tokens), number(x.sampled), seconds((x.sealed ?? Date.now() / 1000) - x.opened)];
    const open = () => { location.hash = `#/x/${x.id}`; };
    return el("tr", { tabIndex: 0, on: { click: open, keydown: (e) => e.key === "Enter" && open() } }, cells.map((c) => el("td", {}, c)), el("td", {}, lane(x, from, to)));
  });
  return el("table", { id: "executions" }, el("thead", {}, head), el("tbody", {}, body));
}

function plot(name, points) {
  const values = points.filter(([, y]) => Number.isFinite(y));
  if (values.length < 1) return null;
  const ys = values.map(([, y]) => y), xs = values.map(([x]) => x), lo = Math.min(...ys), hi = Math.max(...ys), x0 = Math.min(...xs), x1 = Math.max(...xs);
  const at = ([x, y]) => `${(((x - x0) / Math.max(x1 - x0, 1e-9)) * 296 + 2).toFixed(1)},${(86 - ((y - lo) / Math.max(hi - lo, 1e-12)) * 82).toFixed(1)}`;
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "plot"); svg.setAttribute("viewBox", "0 0 300 90"); svg.setAttribute("preserveAspectRatio", "none");
  const path = document.createElementNS(svg.namespaceURI, "path");
  path.setAttribute("d", values.length > 1 ? "M" + values.map(at).join("L") : `M2,45L298,45`);
  svg.append(path);
  return el("figure", {}, svg, el("figcaption", {}, `${name}: ${fixed(ys.at(-1), 4)}  (${fixed(lo, 3)} to ${fixed(hi, 3)})`));
}

function cellRoles(run) {
  const from = Math.min(...run.cells.flatMap((c) => c.roles.map(([start]) => start))), to = Math.max(...run.cells.flatMap((c) => c.roles.map(([, end]) => end ?? Date.now() / 1000)));
  return el("table", {}, run.cells.map((cell) => {
    const box = el("div", { className: "lane" });
    for (const [start, end, role] of cell.roles) box.append(el("i", { className: role, title: role, style: { left: ((start - from) / (to - from)) * 100 + "%", width: (((end ?? to) - start) / (to - from)) * 100 + "%" } }));
    return el("tr", {}, el("td", {}, cell.name), el("td", { className: "dim" }, `idle ${fixed(100 * cell.idle, 0)} %`), el("td", { style: { width: "80%" } }, box));
  }));
}

function drawRun() {
  const run = state.run, scroll = $("main").scrollTop;
  crumbs([run.name]);
  const done = run.executions.filter((x) => x.sealed !== null), valid = done.filter((x) => x.valid);
  const mean = valid.length ? valid.reduce((sum, x) => sum + x.reward, 0) / valid.length : null;
  const plots = ["reward", "loss", "grad_norm", "staleness", "sharing", "step_s", "idle_share"].map((name) => plot(name, run.steps.map((s) => [s.step, s[name]]))).filter(Boolean);
  $("main").replaceChildren(
    facts({ kind: run.kind, model: run.model, harness: run.harness, executions: `${done.length} of ${run.executions.length} ended`, valid: valid.length, reward: fixed(mean, 3), steps: run.steps.length, tokens: number(run.executions.reduce((s, x) => s + x.tokens, 0)) }),
    ...(plots.length ? [el("div", { className: "plots" }, plots)] : []),
    ...(run.cells.length ? [el("h2", {}, "Cells"), cellRoles(run)] : []),
    el("h2", {}, "Executions"), executionTable(run));
  $("main").scrollTop = scroll;
}

async function showRun() {
  state.run = await api("run");
  $("detail").hidden = true;
  drawRun();
}

// ---- execution ------------------------------------------------------------------------------------------------------

const ROLE_COLOURS = { main: "#3b74d1", "main-summary": "#8458c9", subagent: "#2b9a74", "subagent-summary": "#8aa33a", auxiliary: "#8b939c" };
const EDGE_STYLES = { continues: ["solid", "#9aa2ab"], retries: ["dashed", "#d07a1f"], forks: ["solid", "#2b9a74"], returns: ["dotted", "#2b9a74"], compacts: ["solid", "#8458c9"], rerenders: ["dashed", "#c2453b"] };

function graphStyle() {
  const fg = getComputedStyle(document.body).color;
  return [
    { selector: "node", style: { label: "data(label)", "font-size": 9, "text-valign": "center", "text-wrap": "wrap", color: fg, shape: "round-rectangle", width: "data(width)", height: 22, "background-color": "data(colour)", "background-opacity": 0.28, "border-width": 1, "border-color": "data(colour)" } },
    { selector: "node[provenance = 'sampled']", style: { "background-opacity": 0.75 } },
    { selector: "node[?orphan]", style: { "border-style": "dashed", "background-opacity": 0.1 } },
    { selector: "node[weight > 0]", style: { "border-width": 3, "border-color": "#e0a31a" } },
    { selector: "node.found", style: { "border-width": 3, "border-color": "#e0415a" } },
    { selector: "node:selected", style: { "border-width": 3, "border-color": fg } },
    { selector: "edge", style: { width: 1.4, "curve-style": "bezier", "target-arrow-shape": "triangle", "arrow-scale": 0.7, "line-color": "data(colour)", "target-arrow-color": "data(colour)", "line-style": "data(line)", label: "data(label)", "font-size": 8, color: fg, "text-rotation": "autorotate", "text-background-color": getComputedStyle(document.body).backgroundColor, "text-background-opacity": 0.8 } },
  ];
}

function elements(graph) {
  const nodes = graph.nodes.map((n) => ({ data: { ...n, colour: ROLE_COLOURS[n.role] || "#8b939c", width: Math.min(190, 44 + 14 * Math.log2(1 + n.tokens)), label: `${n.label}${n.folded ? `  +${n.folded}` : ""}` } }));
  const edges = graph.edges.map((e, i) => {
    const [line, colour] = EDGE_STYLES[e.kind] || EDGE_STYLES.continues;
    return { data: { id: `e${i}`, ...e, line, colour, label: e.kind === "continues" ? "" : [e.kind, e.reason, e.inferred ? "(inferred)" : ""].filter(Boolean).join(" ") } };
  });
  return [...nodes, ...edges];
}

function drawGraph() {
  const box = el("div", { id: "graph" });
  const legend = el("div", { className: "legend" },
    Object.entries(ROLE_COLOURS).map(([role, colour]) => el("span", {}, el("b", { style: { background: colour } }), role)),
    Object.entries(EDGE_STYLES).map(([kind, [line, colour]]) => el("span", {}, el("b", { style: { borderTop: `2px ${line} ${colour}`, height: 0, width: "1.6em" } }), kind)),
    el("span", {}, el("b", { style: { border: "2px solid #e0a31a" } }), "trained"), el("button", { on: { click: () => toggleAll() } }, state.graph.collapsed ? "expand all (e)" : "collapse (e)"));
  $("main").replaceChildren(legend, box);
  state.cy?.destroy();
  state.cy = cytoscape({ container: box, elements: elements(state.graph), style: graphStyle(), wheelSensitivity: 0.3, minZoom: 0.05, maxZoom: 3, textureOnViewport: true, hideEdgesOnViewport: state.graph.nodes.length > 600,
    layout: { name: "dagre", rankDir: "LR", nodeSep: 14, rankSep: 44, animate: false } });
  state.cy.on("tap", "node", (event) => { location.hash = `#/x/${state.graph.execution}/n/${event.target.id()}`; });
  document.body.dataset.drawn = state.graph.nodes.length;
}

async function showExecution(id, keep = false) {
  const collapsed = keep ? state.graph?.collapsed ?? true : true;
  state.graph = await api(`executions/${id}/graph${collapsed ? "" : "/full"}`);
  const x = state.graph.summary;
  crumbs([x.run, "#/"], [`${id} ${x.task}`], [x.valid ? `reward ${fixed(x.reward, 2)}` : x.status || "running"], [`${x.calls} calls, ${number(x.tokens)} tokens, ${x.branches} branches`]);
  drawGraph();
}

async function toggleAll() {
  const id = state.graph.execution;
  state.graph = await api(`executions/${id}/graph${state.graph.collapsed ? "/full" : ""}`);
  drawGraph();
}

// ---- segment --------------------------------------------------------------------------------------------------------

function heat(logprob) {                                // surprise: 0 (certain) .. 8 nats and more
  return logprob === null ? "transparent" : `rgb(224 65 90 / ${Math.min(Math.max(-logprob / 8, 0), 1) * 0.6})`;
}

function tokenView(page) {
  return el("pre", { className: "tokens" }, page.tokens.map(([id, text, logprob, version]) =>
    el("span", { style: { background: heat(logprob) }, title: `id ${id}` + (logprob === null ? "" : `  logprob ${fixed(logprob, 4)}  version ${version}`) }, text)));
}

async function showNode(id, node) {
  const page = await api(`executions/${id}/nodes/${node}`);
  state.node = page;
  state.cy?.elements().unselect();
  state.cy?.getElementById(node).select();
  const more = page.next === null ? null : el("button", { on: { click: async (event) => {
    const next = await api(`executions/${id}/nodes/${node}/from/${page.next}`);
    page.next = next.next;
    event.target.before(tokenView(next));
    if (page.next === null) event.target.remove();
  } } }, "more tokens");
  $("detail").replaceChildren(
    el("h2", {}, `${page.provenance} segment ${node}`),
    facts({ role: page.role, tokens: page.count, call: page.call ?? "-", versions: page.versions.join(", ") || "-", finish: page.finish || "-", "mean logprob": fixed(page.mean_logprob, 3), "loss weight": page.weight ? fixed(page.weight, 6) : "not trained", engine: page.engine || "-" }),
    el("h2", {}, "Tokens"), tokenView(page), ...(more ? [more] : []),
    el("div", { id: "diff" }, page.sibling ? el("button", { on: { click: showDiff } }, `compare with sibling ${page.sibling} (d)`) : null),
    ...[["Request", page.request], ["Reply", page.reply]].filter(([, text]) => text).flatMap(([title, text]) => [el("h2", {}, title), el("pre", {}, text)]));
  $("detail").hidden = false;
  state.cy?.resize();
}

async function showDiff() {
  if (!state.node?.sibling) return;
  const diff = await api(`executions/${state.graph.execution}/nodes/${state.node.id}/diff`);
  const tags = { same: "span", added: "ins", removed: "del" };
  $("diff").replaceChildren(el("h2", {}, `${diff.kind}: what changed against ${diff.sibling}`), diff.reason ? el("p", { className: "dim" }, diff.reason) : "", el("pre", {}, diff.parts.map(([kind, text]) => el(tags[kind], {}, text))));
}

// ---- routing, keyboard, live ----------------------------------------------------------------------------------------

async function route() {
  const [, , id, , node] = location.hash.split("/");
  try {
    if (!id) { state.graph = null; document.body.dataset.drawn = ""; await showRun(); return; }
    if (state.graph?.execution !== id) await showExecution(id);
    if (node) await showNode(id, node); else $("detail").hidden = true;
  } catch (error) {
    $("main").replaceChildren(el("div", { className: "error", role: "alert" }, `This can't be shown: ${error.message}`));
  }
}

function step(way) {
  if (!state.graph) {
    const rows = [...document.querySelectorAll("#executions tbody tr")], at = rows.indexOf(document.activeElement);
    rows[Math.min(Math.max(at + way, 0), rows.length - 1)]?.focus();
    return;
  }
  const ids = state.graph.nodes.map((n) => n.id), at = ids.indexOf(state.node?.id);
  const next = ids[Math.min(Math.max(at + way, 0), ids.length - 1)];
  location.hash = `#/x/${state.graph.execution}/n/${next}`;
  state.cy.center(state.cy.getElementById(next));
}

async function search(text) {
  state.filter = text.toLowerCase();
  if (!state.graph) { drawRun(); return; }
  state.cy.nodes().removeClass("found");
  if (!text) return;
  const answer = await fetch(`api/executions/${state.graph.execution}/search?q=${encodeURIComponent(text)}${query ? "&" + query.slice(1) : ""}`);
  const hits = answer.ok ? (await answer.json()).nodes : [];
  const found = state.cy.nodes().filter((n) => hits.includes(n.id()) || n.data("label").toLowerCase().includes(state.filter));
  found.addClass("found");
  if (found.length) state.cy.animate({ fit: { eles: found, padding: 80 } }, { duration: 0 });
  $("search").title = `${hits.length} segments`;
}

document.addEventListener("keydown", (event) => {
  if (event.target === $("search")) { if (event.key === "Escape") { $("search").value = ""; search(""); $("main").focus(); } return; }
  const keys = { "/": () => $("search").focus(), j: () => step(1), k: () => step(-1), f: () => state.cy?.fit(undefined, 30), e: () => state.graph && toggleAll(), d: showDiff,
    Escape: () => { location.hash = $("detail").hidden ? "#/" : `#/x/${state.graph.execution}`; state.node = null; } };
  if (keys[event.key] && !event.ctrlKey && !event.metaKey) { event.preventDefault(); keys[event.key](); }
});
let waiting = 0;
$("search").addEventListener("input", (event) => { clearTimeout(waiting); waiting = setTimeout(() => search(event.target.value), 150); });
window.addEventListener("hashchange", route);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => state.cy?.style(graphStyle()));

const events = new EventSource(`api/events${query}`);
events.addEventListener("run", (event) => { $("live").className = "on"; $("live").textContent = "●"; if (!state.graph) { state.run = JSON.parse(event.data); drawRun(); } });
events.addEventListener("execution", (event) => { const { id } = JSON.parse(event.data); if (state.graph?.execution === id && !state.node) showExecution(id, true); });
events.onerror = () => { $("live").className = ""; $("live").textContent = "○"; };
route();
