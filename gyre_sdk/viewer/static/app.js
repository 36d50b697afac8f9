// Gyre's viewer: run -> execution -> box. Read-only. Text from outside becomes text nodes, never HTML; what could steer
// the reader (control characters, direction overrides) is shown by name.
"use strict";

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const state = {
  run: null, rows: new Map(), lines: new Map(), steps: [], stamp: 0, sort: ["started", 1], filter: "",   // first level
  cy: null, graph: null, opened: new Set(), box: null, tab: "tokens", hits: [], hit: -1, path: "", busy: false, // the others
};

const plain = (text) => String(text)
  .replace(/[\u0000-\u0008\u000b-\u001f\u007f]/g, (c) => (c === "\u007f" ? "\u2421" : String.fromCharCode(0x2400 + c.charCodeAt(0))))
  .replace(/[\u0080-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, (c) => `\u27e8U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}\u27e9`);

function el(tag, props = {}, ...children) {
  const node = tag in { svg: 0, path: 0, circle: 0, line: 0, title: 0 } ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, plain(value));
  }
  for (const child of children.flat(3)) if (child !== null && child !== undefined && child !== "") node.append(child instanceof Node ? child : plain(child));
  return node;
}

async function api(path, query = {}) {
  const asked = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== undefined));
  const answer = await fetch(`api/${path}${asked.size ? `?${asked}` : ""}`);
  if (!answer.ok) throw new Error((await answer.text()).slice(0, 300));
  return answer.json();
}
const boxUrl = (box, what = "") => `executions/${state.graph.summary.id}/box/${encodeURIComponent(box)}${what && `/${what}`}`;

const short = (n) => (n === null || n === undefined ? "-" : n >= 1e6 ? (n / 1e6).toFixed(2) + "M" : n >= 1e4 ? (n / 1e3).toFixed(0) + "k" : String(n));
const span = (s) => (s >= 5400 ? (s / 3600).toFixed(1) + " h" : s >= 100 ? (s / 60).toFixed(1) + " min" : s.toFixed(1) + " s");
const fixed = (x, d = 3) => (typeof x === "number" ? (x !== 0 && Math.abs(x) < 10 ** -d ? x.toExponential(1) : x.toFixed(d)) : "-");
const facts = (pairs) => el("dl", { class: "facts" }, Object.entries(pairs).filter(([, v]) => v !== "" && v !== null && v !== undefined).map(([k, v]) => el("div", {}, el("dt", {}, k), el("dd", {}, v))));
const say = (text) => { $("said").textContent = plain(text); };

function place(parts, keys) {
  $("crumbs").replaceChildren(...parts.flatMap(([text, href], i) => [i ? " / " : "", href ? el("a", { href }, text) : plain(text)]));
  document.title = plain(["gyre", ...parts.map(([text]) => text)].join(" · "));
  $("keys").replaceChildren(...keys.flatMap(([key, what]) => [el("kbd", {}, key), what]));
}

// ---- first level: the run -------------------------------------------------------------------------------------------

const ended = (x) => x.ended ?? state.run.now;
function verdict(x) {
  if (x.status === "") return el("span", { class: "dim" }, "running");
  if (!x.valid) return el("span", { class: "bad", title: x.message }, `invalid: ${x.failure || x.status}`);
  return el("span", { class: x.reward > 0 ? "good" : "warn", title: x.message }, fixed(x.reward, 2));
}
const COLUMNS = [                                       // name, sort key, cell, numeric
  ["execution", (x) => x.id, (x) => x.id], ["task", (x) => x.task, (x) => x.task], ["group", (x) => x.group, (x) => x.group],
  ["reward", (x) => (x.valid ? x.reward : x.status ? -1 : -2), verdict], ["status", (x) => x.status, (x) => x.status || "-"],
  ["calls", (x) => x.calls, (x) => x.calls, 1], ["branches", (x) => x.branches, (x) => x.branches, 1], ["tokens", (x) => x.tokens, (x) => short(x.tokens), 1],
  ["sampled", (x) => x.sampled, (x) => short(x.sampled), 1], ["version", (x) => x.versions?.[1] ?? -1, (x) => (x.versions ? [...new Set(x.versions)].join("–") : "-"), 1],
  ["took", (x) => ended(x) - x.opened, (x) => span(ended(x) - x.opened), 1], ["started", (x) => x.opened, null],
];

const bar = (from, to, top = 1, height = 12) => `M${from.toFixed(2)},${top}H${Math.max(to, from).toFixed(2)}v${height}H${from.toFixed(2)}z`;
function lane(x, zero) {
  const at = x.opened - zero, kinds = ["", "", ""];
  for (const [start, end, kind] of x.spans) kinds[kind] += bar(at + start, at + (end ?? ended(x) - x.opened));
  const tick = (list) => list.map((s) => `M${(at + s).toFixed(2)},0v14`).join("");
  const words = x.events.map(([, name]) => name).join(", ");
  return el("svg", { class: "lane", preserveAspectRatio: "none", role: "img", "aria-label": `${x.calls} calls in ${span(ended(x) - x.opened)}` },
    el("title", {}, `${x.calls} calls; started ${span(at)} into the run${words && `; ${words}`}`),
    el("path", { class: "wait", d: bar(at, ended(x) - zero, 4, 6) }), ["call", "moved", "failed"].map((name, i) => kinds[i] && el("path", { class: name, d: kinds[i] })),
    x.events.length ? el("path", { class: "event", d: tick(x.events.map(([s]) => s)) }) : null, x.deadline ? el("path", { class: "deadline", d: tick([x.deadline]) }) : null);
}

function table() {
  const [key, way] = state.sort, sorter = COLUMNS.find(([name]) => name === key)[1];
  const all = [...state.rows.values()], zero = Math.min(...all.map((x) => x.opened)), until = Math.max(...all.map(ended)) - zero;
  const rows = all.filter((x) => `${x.id} ${x.task} ${x.group} ${x.status || "running"} ${x.failure || ""} ${x.message} ${Object.keys(x.kinds)}`.toLowerCase().includes(state.filter));
  rows.sort((a, b) => { const [p, q] = [sorter(a), sorter(b)]; return way * (p < q ? -1 : p > q ? 1 : 0); });
  $("found").textContent = state.filter ? `${rows.length} of ${all.length}` : "";
  const lines = rows.slice(0, 2000).map((x) => {
    let line = state.lines.get(x.id);
    if (line?.made !== x || (x.ended === null && line.now !== state.run.now)) {
      const open = () => { location.hash = `#/x/${x.id}`; };
      const row = el("tr", { tabindex: 0, "data-id": x.id, onclick: open, onkeydown: (e) => e.key === "Enter" && open() },
        COLUMNS.filter(([, , cell]) => cell).map(([, , cell, numeric]) => { const c = cell(x); return el("td", { class: numeric ? "n" : null }, c instanceof Node || numeric ? c : el("span", { title: c }, c)); }), el("td", {}, lane(x, zero)));
      state.lines.set(x.id, line = { made: x, now: state.run.now, row });
    }
    line.row.lastChild.firstChild.setAttribute("viewBox", `0 0 ${Math.max(until, 1e-3)} 14`);
    return line.row;
  });
  const sort = (name) => () => { state.sort = [name, key === name ? -way : 1]; drawRun(); $("executions").querySelector(`[data-sort=${name}]`).focus(); };
  const head = COLUMNS.map(([name, , , numeric]) => el("th", { class: numeric ? "n" : null, "aria-sort": key === name ? (way > 0 ? "ascending" : "descending") : null },
    el("button", { onclick: sort(name), "data-sort": name }, name === "started" ? "timeline" : name), name === "started" ? ` 0 – ${span(until)}` : ""));
  return el("table", { id: "executions" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, lines));
}

function plot([field, title]) {
  const points = state.steps.map((s) => [s.step, s[field]]).filter(([, y]) => typeof y === "number");
  if (!points.length) return null;
  const xs = points.map(([x]) => x), ys = points.map(([, y]) => y), [x0, x1, lo, hi] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const at = ([x, y]) => [(x1 > x0 ? (x - x0) / (x1 - x0) : 0.5) * 292 + 4, 74 - (hi > lo ? (y - lo) / (hi - lo) : 0.5) * 68];
  return el("figure", {}, el("svg", { class: "plot", viewBox: "0 0 300 80", preserveAspectRatio: "none", role: "img", "aria-label": `${title} over steps` },
    el("title", {}, points.slice(-40).map(([x, y]) => `step ${x}: ${fixed(y, 4)}`).join("\n")), el("path", { d: "M" + points.map((p) => at(p).map((v) => v.toFixed(1)).join()).join("L") }),
    points.length < 60 ? points.map((p) => el("circle", { cx: at(p)[0], cy: at(p)[1], r: 2 })) : null),
    el("figcaption", {}, el("b", {}, title), ` ${fixed(ys.at(-1), 4)}`, points.length > 1 ? `  (${fixed(lo)} to ${fixed(hi)})` : ""));
}
const PLOTS = [["reward", "reward"], ["loss", "loss"], ["staleness", "staleness, versions"], ["sharing", "sharing"], ["idle_share", "idle share"], ["grad_norm", "gradient norm"], ["entropy", "entropy"], ["seconds", "seconds per step"]];

function cells(run) {
  const from = Math.min(...run.cells.flatMap((c) => c.roles.map(([start]) => start)));
  const idle = (c, role) => (typeof c[`idle_${role}`] === "number" ? `${(100 * c[`idle_${role}`]).toFixed(0)} % of ${role}` : "");
  return el("table", { id: "cells" }, el("tbody", {}, run.cells.map((c) => el("tr", {}, el("td", {}, c.name), el("td", { class: "dim" }, "idle: ", [idle(c, "rollout"), idle(c, "training")].filter(Boolean).join(", ") || "-"),
    el("td", {}, el("svg", { class: "lane", viewBox: `0 0 ${Math.max(run.now - from, 1e-3)} 14`, preserveAspectRatio: "none", role: "img", "aria-label": c.roles.map(([, , role]) => role).join(", ") },
      el("title", {}, c.roles.map(([start, end, role]) => `${span(start - from)} ${role}${end ? "" : " (now)"}`).join("\n")), c.roles.map(([start, end, role]) => el("path", { class: role, d: bar(start - from, (end ?? run.now) - from) }))))))));
}
const key = (...names) => names.flatMap(([name, text]) => [el("span", { class: `key k-${name}` }), text]);
function drawRun() {
  const run = state.run, all = [...state.rows.values()], focused = document.activeElement?.dataset?.id, scroll = $("main").scrollTop;
  place([[run.name]], [["/", "search"], ["j k", "next, previous"], ["Enter", "open"], ["t", "colours"]]);
  const done = all.filter((x) => x.status), valid = done.filter((x) => x.valid && x.reward !== null), sum = (f) => all.reduce((s, x) => s + f(x), 0);
  const plots = PLOTS.map(plot).filter(Boolean);
  $("main").replaceChildren(
    facts({ kind: run.kind, model: run.model, harness: run.harness, executions: `${done.length} of ${all.length} ended`, valid: valid.length, "mean reward": valid.length ? fixed(valid.reduce((s, x) => s + x.reward, 0) / valid.length) : "-", steps: state.steps.length || "", tokens: short(sum((x) => x.tokens)), sampled: short(sum((x) => x.sampled)) }),
    plots.length ? el("div", { class: "plots" }, plots) : el("p", { class: "note" }, run.kind === "train" ? "No training step has ended yet." : "This run trains nothing: there are no steps to plot."),
    ...(run.cells.length ? [el("h2", {}, "Cells ", el("small", {}, key(["rollout", "rollout"], ["training", "training"], ["failed", "lost"]))), cells(run)] : []),
    el("h2", {}, "Executions ", el("small", {}, key(["call", "call"], ["wait", "tool or queue"], ["moved", "call on another cell than before"], ["failed", "failed call"], ["deadline", "deadline"]))),
    all.length ? table() : el("p", { class: "empty" }, "No execution has been recorded in this run yet. They appear here as soon as one starts."));
  $("main").scrollTop = scroll;
  if (focused) document.querySelector(`tr[data-id="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  document.body.dataset.listed = all.length;
}
function merge(page) {
  for (const row of page.executions) state.rows.set(row.id, row);
  state.steps = [...state.steps.slice(0, page.steps_from), ...page.steps];
  state.stamp = page.stamp;
  state.run = page;
}

// ---- second level: an execution -------------------------------------------------------------------------------------

const ROLES = { main: "#3b74d1", "main-summary": "#8458c9", subagent: "#2b9a74", "subagent-summary": "#8aa33a", auxiliary: "#8b939c" };
const EDGES = { continues: ["solid", "#9aa2ab"], retries: ["dashed", "#d07a1f"], forks: ["solid", "#2b9a74"], returns: ["dotted", "#2b9a74"], compacts: ["solid", "#8458c9"], rerenders: ["dashed", "#d0453b"] };

function graphStyle() {
  const { color, backgroundColor } = getComputedStyle(document.body);
  return [
    { selector: "node", style: { label: "data(label)", "font-size": 9, "text-valign": "center", "text-wrap": "wrap", color, shape: "round-rectangle", width: "data(width)", height: 30, "background-fill": "linear-gradient", "background-gradient-direction": "to-right", "background-gradient-stop-colors": "data(fill)", "background-gradient-stop-positions": "data(stops)", "border-width": 1, "border-color": "data(colour)" } },
    { selector: "node[?orphan]", style: { "border-style": "dashed", opacity: 0.55 } },
    { selector: "node[trained > 0]", style: { "border-width": 3, "border-color": "#e0a31a" } },
    { selector: "node[folded > 0]", style: { "border-style": "double", "border-width": 4 } },
    { selector: "node.path", style: { "underlay-color": "#e0a31a", "underlay-opacity": 0.45, "underlay-padding": 5 } },
    { selector: "node.found", style: { "underlay-color": "#e0415a", "underlay-opacity": 0.4, "underlay-padding": 5 } },
    { selector: "node:selected", style: { "border-width": 3, "border-color": color } },
    { selector: "edge", style: { width: 1.4, "curve-style": "bezier", "target-arrow-shape": "triangle", "arrow-scale": 0.7, "line-color": "data(colour)", "target-arrow-color": "data(colour)", "line-style": "data(line)", label: "data(label)", "font-size": 8, color, "text-wrap": "ellipsis", "text-max-width": 150, "text-background-color": backgroundColor, "text-background-opacity": 0.85, "min-zoomed-font-size": 6 } },
    { selector: "edge[kind = 'continues'][?plain]", style: { "curve-style": "haystack", "haystack-radius": 0, "target-arrow-shape": "none" } },
  ];
}

function elements({ nodes, edges }) {
  const mix = (hex, alpha) => { const { backgroundColor: b } = getComputedStyle(document.body), under = b.match(/\d+/g).map(Number); return `rgb(${[1, 3, 5].map((i, k) => Math.round(parseInt(hex.slice(i, i + 2), 16) * alpha + under[k] * (1 - alpha))).join(",")})`; };
  const title = (n) => (n.calls.length === 0 ? "prompt" : n.calls[2] === 1 ? `call ${n.calls[0]}` : n.calls[2] === 2 ? `calls ${n.calls[0]}, ${n.calls[1]}` : n.calls[1] - n.calls[0] < n.calls[2] ? `calls ${n.calls[0]}–${n.calls[1]}` : `${n.calls[2]} calls, ${n.calls[0]} to ${n.calls[1]}`) + (n.folded ? `  +${n.folded}` : "");
  return [
    ...nodes.map((n) => {
      const colour = ROLES[n.role] || "#8b939c", given = (100 * (n.tokens - n.sampled)) / Math.max(n.tokens, 1), pale = mix(colour, 0.14), full = mix(colour, 0.5);
      return { data: { ...n, colour, fill: `${pale} ${pale} ${full} ${full}`, stops: `0% ${given}% ${given}% 100%`, width: 46 + 11 * Math.log2(1 + n.tokens / 16), title: title(n), label: `${title(n)}\n${short(n.tokens)} tokens${n.finish && n.finish !== "stop" ? `, ${n.finish}` : ""}` } };
    }),
    ...edges.map((e, i) => { const [line, colour] = EDGES[e.kind]; return { data: { id: `e${i}`, ...e, plain: nodes.length > 60, line, colour, label: e.kind === "continues" ? "" : plain([e.kind, e.reason && `: ${e.reason}`, e.inferred ? " (inferred)" : ""].join("")) } }; }),
  ];
}

const sample = (line, colour) => el("svg", { width: 26, height: 8 }, el("line", { x1: 0, y1: 4, x2: 26, y2: 4, stroke: colour, "stroke-width": 2, "stroke-dasharray": { solid: "none", dashed: "5 3", dotted: "2 2" }[line] }));
const patch = (colour) => el("svg", { width: 10, height: 10 }, el("path", { d: "M0,0h10v10h-10z", fill: colour }));

function drawGraph(view) {
  const g = state.graph, x = g.summary, taken = x.trained.paths;
  place([[state.run.name, "#/"], [`${x.id}  ${x.task}`]], [["/", "search"], ["n", "next hit"], ["← → ↑ ↓", "move"], ["Enter", "look at"], ["e", "expand"], ["c", "collapse"], ["a", "all"], ["f", "fit"], ["d", "diff"], ["Esc", "back"]]);
  const box = el("div", { id: "graph", tabindex: 0, role: "application", "aria-label": "Branch graph; arrow keys move, Enter opens a box" });
  const notes = [x.problem && `The log: ${x.problem}`, x.tokenizer && `${x.tokenizer}.`, ...x.failed.map(([number, error]) => `Call ${number} failed: ${error}`)].filter(Boolean);
  $("main").replaceChildren(
    facts({ outcome: x.status ? verdict({ ...x, failure: null }) : el("span", { class: "dim" }, "running"), harness: x.harness, dialect: x.dialects.join(", "), group: x.group, calls: x.calls + (x.pending ? `, ${x.pending} pending` : ""), branches: x.branches, "unique tokens": short(x.unique), sharing: x.unique ? `${(x.flattened / x.unique).toFixed(2)}x` : "-", why: x.message, ...Object.fromEntries(Object.entries(x.metrics).slice(0, 6).map(([k, v]) => [k, fixed(v, 2)])) }),
    el("div", { class: "legend" }, Object.entries(ROLES).map(([role, c]) => el("span", {}, patch(c), role)), el("span", {}, "pale: given, strong: sampled"), Object.entries(EDGES).map(([kind, [line, c]]) => el("span", {}, sample(line, c), kind)), el("span", {}, patch("#e0a31a"), "trained")),
    taken.length ? el("div", { class: "chips", id: "taken" }, x.trained.step === null ? "selected, not trained yet:" : `trained in step ${x.trained.step}:`, taken.map((p) => el("button", { "aria-pressed": state.path === p.leaf, onclick: () => showPath(p) }, `${p.role} to ${p.leaf}: ${short(p.tokens)} tokens, weight ${fixed(p.weight, 5)}, advantage ${fixed(p.advantage)}`))) : "",
    ...notes.slice(0, 4).map((note) => el("p", { class: "note" }, note)), g.nodes.length ? box : el("p", { class: "empty" }, x.calls ? "No call of this execution has a reply yet, so there is no graph." : "The harness has made no call yet."));
  state.cy?.destroy();
  state.cy = null;
  document.body.dataset.drawn = g.nodes.length;
  if (!g.nodes.length) return;
  state.cy = cytoscape({ container: box, elements: elements(g), style: graphStyle(), minZoom: 0.03, maxZoom: 3, hideEdgesOnViewport: g.nodes.length > 500, layout: { name: "null" } });
  const kept = g.nodes.length > 60 ? state.cy.edges("[kind = 'continues']") : state.cy.edges();   // of many boxes, the tree alone decides where they are
  state.cy.nodes().union(kept).layout({ name: "dagre", rankDir: "LR", nodeSep: 12, rankSep: g.nodes.length > 60 ? 46 : 95, ranker: "longest-path", animate: false, fit: false }).run();
  state.cy.on("tap", "node", (event) => look(event.target.id()));
  state.cy.on("dbltap", "node", (event) => toggle(event.target.id()));
  if (view) state.cy.viewport(view);
  else {                                                // all of it if it can be read then, else where it begins
    const at = state.cy.nodes().map((n) => n.position()), [x0, x1, y0, y1] = [Math.min(...at.map((p) => p.x)) - 80, Math.max(...at.map((p) => p.x)) + 80, Math.min(...at.map((p) => p.y)) - 30, Math.max(...at.map((p) => p.y)) + 30];
    const fits = Math.min(state.cy.width() / (x1 - x0), state.cy.height() / (y1 - y0)), z = Math.min(Math.max(fits, 0.55), 1.4), middle = fits < 0.55 ? at[0].y : (y0 + y1) / 2;
    state.cy.viewport({ zoom: z, pan: { x: fits < 0.55 ? -x0 * z : (state.cy.width() - (x0 + x1) * z) / 2, y: state.cy.height() / 2 - middle * z } });
  }
  if (state.box) state.cy.getElementById(state.box.id).select();
  if (state.path || state.hits.length) mark();
}

async function loadGraph(id, show = "") {
  if (state.busy) return;
  state.busy = true;
  try { state.graph = await api(`executions/${encodeURIComponent(id)}/graph`, { open: [...state.opened].join(), show }); } finally { state.busy = false; }
}
async function redraw(show = "") {
  const view = state.cy && { zoom: state.cy.zoom(), pan: { ...state.cy.pan() } }, focused = document.activeElement?.id === "graph";
  await loadGraph(state.graph.summary.id, show);
  drawGraph(view);
  if (focused) $("graph")?.focus();
}

async function toggle(id, close = false) {              // open a box, or close the one it is a part of
  const { nodes, folded, within } = state.cy.getElementById(id).data(), shut = state.opened.has(id) ? id : within;
  if (!close && (nodes > 1 || (folded && !state.opened.has(id)))) state.opened.add(id); else state.opened.delete(shut);
  await redraw();
  const start = (close || nodes === 1 ? shut || id : id).split(":")[0], part = state.cy.nodes().filter((n) => n.id().split(":")[0] === start).first();
  if (part.nonempty()) { state.cy.nodes().unselect(); part.select(); state.cy.center(part); }
  say(`${state.graph.nodes.length} boxes`);
}
async function toggleAll() {
  const closed = state.graph.nodes.filter((n) => n.nodes > 1 || n.folded).map((n) => n.id);
  if (state.opened.size) state.opened.clear(); else closed.slice(0, 60).forEach((id) => state.opened.add(id));
  await redraw();
}
function mark() {
  const trunk = new Set();
  for (let at = state.path && state.graph.summary.trained.paths.find((p) => p.leaf === state.path)?.box; at; at = state.graph.edges.find((e) => e.target === at && e.kind === "continues")?.source) trunk.add(at);
  state.cy?.batch(() => state.cy.nodes().forEach((n) => { n.toggleClass("path", trunk.has(n.id())); n.toggleClass("found", state.hits.includes(n.id())); }));
}
function showPath(p) {
  state.path = state.path === p.leaf ? "" : p.leaf;
  for (const [i, button] of [...$("taken").querySelectorAll("button")].entries()) button.setAttribute("aria-pressed", state.graph.summary.trained.paths[i].leaf === state.path);
  mark();
}
function look(id) { location.hash = `#/x/${state.graph.summary.id}/n/${encodeURIComponent(id)}`; }

// ---- third level: a box ---------------------------------------------------------------------------------------------

function tokens(page) {
  const heat = (p) => (p === null ? "" : `color-mix(in srgb, var(--hot) ${(Math.min(-p / 6, 1) * 70).toFixed(1)}%, transparent)`);   // surprise: 0 to 6 nats
  let version = -1;
  return el("pre", { class: "tokens" }, page.tokens.map(([id, text, logprob, v, call]) => {
    const node = el("span", { class: call >= 0 ? "s" : null, "data-i": id, title: call >= 0 ? `id ${id}, logprob ${logprob}, probability ${fixed(Math.exp(logprob))}, version ${v}, call ${call}` : `id ${id}, given` }, text);
    node.style.background = heat(logprob);
    const label = v >= 0 && v !== version ? el("b", {}, `v${v}`) : null;
    version = v >= 0 ? v : version;
    return [label, node];
  }));
}

function more(into, load, draw, next) {
  const button = el("button", { onclick: async () => { const page = await load(next); button.remove(); into.append(draw(page)); more(into, load, draw, page.next); } }, "more");
  if (next !== null) into.append(button);
}

const TABS = { tokens: "tokens", text: "text", request: "request", reply: "reply", record: "record", diff: "diff" };
async function showTab(name) {
  const b = state.box, into = el("div", { role: "tabpanel", id: "panel" });
  state.tab = name === "diff" && !b.sibling ? "tokens" : name;
  for (const tab of document.querySelectorAll("[role=tab]")) tab.setAttribute("aria-selected", tab.dataset.tab === state.tab);
  if (state.tab === "tokens") {
    into.append(tokens(b));
    more(into, (from) => api(boxUrl(b.id), { from }), tokens, b.next);
  } else if (state.tab === "diff") {
    const d = await api(boxUrl(b.id, "diff")), tags = { same: "span", added: "ins", removed: "del", skipped: "i" };
    into.append(el("p", { class: "note" }, `${d.kind}: call ${d.mine} against call ${d.theirs}. ${d.reason}${d.inferred ? " (inferred)" : ""} Equal before: ${d.same_before} tokens; removed ${d.removed}, added ${d.added}; equal after: ${d.same_after}.`),
      el("pre", { class: "diff" }, d.removed || d.added ? d.parts.map(([kind, text]) => el(tags[kind], {}, kind === "skipped" ? `\n… ${text} …\n` : text)) : "The same tokens, one by one."),
      el("p", { class: "note" }, `first ids removed: ${d.removed_ids.join(" ") || "-"}`), el("p", { class: "note" }, `first ids added: ${d.added_ids.join(" ") || "-"}`));
  } else {
    const load = (from) => api(boxUrl(b.id, state.tab), { from }), page = await load(0);
    into.append(el("p", { class: "note" }, page.what === "text" ? "the box's tokens, decoded" : `call ${page.call}, ${page.what === "record" ? "as it is in the log" : `in the ${b.dialect || "chat"} dialect, put together from the log`}`),
      page.length ? el("pre", {}, page.text) : el("p", { class: "empty" }, `The log holds no ${page.what} for this call.`));
    more(into, load, (p) => el("pre", {}, p.text), page.next);
  }
  if (state.box === b) $("panel").replaceWith(into);
}

async function showBox(id) {
  const b = state.box = await api(boxUrl(id)), inside = state.graph.nodes.find((n) => n.id === id)?.inside ?? [];
  state.cy?.nodes().unselect();
  state.cy?.getElementById(id).select();
  const into = state.graph.edges.filter((e) => e.target === id && e.kind !== "continues").map((e) => `${e.kind} call ${e.calls[0]}${e.reason && `: ${e.reason}`}${e.inferred ? " (inferred)" : ""}`);
  $("detail").replaceChildren(
    el("h2", {}, `${b.role} `, el("small", {}, b.id)),
    facts({ tokens: `${b.count} at ${b.position}`, sampled: b.sampled, nodes: b.nodes, calls: b.calls.length > 8 ? `${b.calls[0]} to ${b.calls.at(-1)}` : b.calls.join(", "), versions: [...new Set(b.versions)].join(" to "), finish: b.finish, "mean logprob": b.mean_logprob === null ? "" : fixed(b.mean_logprob), "loss weight": b.weight ? fixed(b.weight, 6) : "not trained", advantage: b.weight ? fixed(b.advantage) : "", engine: b.engine, delivery: b.orphan ? "orphan: never delivered, never trained" : "" }),
    ...[...into, ...inside].map((text) => el("p", { class: "note" }, text)),
    el("div", { class: "tabs", role: "tablist" }, Object.keys(TABS).map((name, i) => (name === "diff" && !b.sibling ? null : el("button", { role: "tab", "data-tab": name, title: `${i + 1}`, onclick: () => attempt(() => showTab(name)) }, name === "diff" ? `diff: ${b.sibling.kind}${b.sibling.kind === "sibling" ? "" : ` call ${b.sibling.call}`}` : name))),
      el("button", { onclick: () => $("detail").classList.toggle("ids"), title: "token ids (i)" }, "ids"), el("button", { onclick: () => attempt(() => toggle(id)), title: "e" }, "expand"), el("button", { onclick: () => attempt(() => toggle(id, true)), title: "c" }, "collapse")),
    el("div", { id: "panel" }));
  $("detail").hidden = false;
  state.cy?.resize();
  const drawn = state.cy?.getElementById(id), seen = drawn?.nonempty() && drawn.renderedBoundingBox();
  if (seen && (seen.x1 < 0 || seen.y1 < 0 || seen.x2 > state.cy.width() || seen.y2 > state.cy.height())) state.cy.center(drawn);
  say(`${b.role}, ${b.count} tokens, ${into.join("; ")}`);
  await showTab(state.tab);
  document.body.dataset.box = id;
}

// ---- where we are, keys, search, live -------------------------------------------------------------------------------

async function attempt(work) {
  try { await work(); } catch (error) { $("main").prepend(el("p", { class: "error", role: "alert" }, `This can't be shown: ${error.message}`)); }
}

async function route() {
  const [, , id, , box] = location.hash.split("/").map(decodeURIComponent);
  await attempt(async () => {
    const first = state.run ? null : api("run");
    document.body.dataset.level = box ? "box" : id ? "execution" : "run";
    if (!box) { $("detail").hidden = true; state.box = null; document.body.dataset.box = ""; state.cy?.resize(); }
    const fresh = id && state.graph?.summary.id !== id;
    if (fresh) { $("search").value = ""; $("found").textContent = ""; Object.assign(state, { opened: new Set(), hits: [], path: "", graph: null }); await loadGraph(id, box); }
    if (first) merge(await first);
    if (!id) { const last = state.graph?.summary.id; state.cy?.destroy(); Object.assign(state, { graph: null, cy: null, hits: [], path: "", filter: "" }); $("search").value = ""; document.body.dataset.drawn = ""; drawRun(); if (last) document.querySelector(`tr[data-id="${CSS.escape(last)}"]`)?.focus(); return; }
    if (fresh) { drawGraph(); if (!box) $("graph")?.focus(); }
    if (box) await showBox(box);
  });
}

function move(way) {                                    // along the graph: to what follows, to where it comes from, to neighbours
  const { nodes, edges } = state.graph, at = state.cy.nodes(":selected").first().id() ?? nodes[0].id, order = nodes.map((n) => n.id);
  const up = edges.filter((e) => e.target === at).sort((a, b) => (a.kind === "continues" ? -1 : 1))[0]?.source, down = edges.filter((e) => e.source === at).map((e) => e.target);
  const side = edges.filter((e) => e.source === up && e.kind === "continues").map((e) => e.target), beside = side.length > 1 ? side : order;
  const to = { next: order[order.indexOf(at) + 1], previous: order[order.indexOf(at) - 1], right: down[0], left: up, down: beside[beside.indexOf(at) + 1], up: beside[beside.indexOf(at) - 1] }[way];
  const target = state.cy.getElementById(state.cy.nodes(":selected").empty() ? at : to ?? at);
  state.cy.nodes().unselect();
  target.select();
  state.cy.center(target);
  say(`${target.data("title")}, ${target.data("role")}, ${target.data("tokens")} tokens`);
  if (state.box) look(target.id());
}
function moveRow(way) {
  const rows = [...document.querySelectorAll("#executions tbody tr")], at = rows.indexOf(document.activeElement);
  rows[Math.min(Math.max(at + way, 0), rows.length - 1)]?.focus();
}
async function search(text) {
  state.filter = text.toLowerCase();
  if (!state.graph) { drawRun(); return; }
  const found = text ? await api(`executions/${state.graph.summary.id}/search`, { q: text, open: [...state.opened].join() }) : { hits: 0, boxes: [], nodes: [] };
  if ($("search").value !== text) return;
  Object.assign(state, { hits: found.boxes, hit: -1 });
  $("found").textContent = text ? `${found.hits} hits in ${found.boxes.length} boxes` : "";
  mark();
  if (found.boxes.length) nextHit(1);
}
function nextHit(way) {
  state.hit = (state.hit + way + state.hits.length) % state.hits.length;
  const target = state.cy.getElementById(state.hits[state.hit]);
  state.cy.nodes().unselect();
  target.select();
  state.cy.center(target);
}

const THEMES = ["auto", "light", "dark"];
function theme(name) {
  document.documentElement.dataset.theme = $("theme").textContent = name;
  localStorage.setItem("theme", name);
  if (state.graph && state.cy) drawGraph({ zoom: state.cy.zoom(), pan: { ...state.cy.pan() } });
}
const nextTheme = () => theme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % 3]);

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target === $("search")) {
    if (event.key === "Escape") { $("search").value = ""; attempt(() => search("")); }
    if (event.key === "Escape" || event.key === "Enter") { event.preventDefault(); if (state.graph) { $("graph")?.focus(); if (event.key === "Enter" && state.hits.length) look(state.hits[Math.max(state.hit, 0)]); } else moveRow(1); }
    return;
  }
  const picked = () => state.box?.id ?? state.cy?.nodes(":selected").first().id(), inGraph = event.target.id === "graph" || event.target === document.body || event.target === $("main") || event.target === $("detail");
  const keys = { "/": () => $("search").focus(), t: nextTheme };
  if (!state.graph) Object.assign(keys, { j: () => moveRow(1), k: () => moveRow(-1) });
  else Object.assign(keys, { j: () => move("next"), k: () => move("previous"), l: () => move("right"), h: () => move("left"), n: () => state.hits.length && nextHit(1), N: () => state.hits.length && nextHit(-1), f: () => state.cy?.fit(undefined, 30), a: () => attempt(toggleAll), e: () => picked() && attempt(() => toggle(picked())), c: () => picked() && attempt(() => toggle(picked(), true)), i: () => $("detail").classList.toggle("ids"),
    d: () => state.box && attempt(() => showTab("diff")), Escape: () => { const shut = state.box; location.hash = shut ? `#/x/${state.graph.summary.id}` : "#/"; if (shut) $("graph")?.focus(); } },
    state.box ? Object.fromEntries(Object.keys(TABS).map((name, i) => [i + 1, () => attempt(() => showTab(name))])) : {},
    inGraph ? { ArrowRight: () => move("right"), ArrowLeft: () => move("left"), ArrowDown: () => move("down"), ArrowUp: () => move("up"), Enter: () => picked() && look(picked()) } : {});
  if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
});
let waiting = 0; $("search").addEventListener("input", (event) => { clearTimeout(waiting); waiting = setTimeout(() => attempt(() => search(event.target.value)), 120); });
$("theme").addEventListener("click", nextTheme);
window.addEventListener("hashchange", route);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme(document.documentElement.dataset.theme));

function follow() {
  const events = new EventSource(`api/events?stamp=${state.stamp}&steps=${state.steps.length}`);
  events.addEventListener("hello", () => { $("live").className = "on"; $("live").textContent = "● live"; });
  events.addEventListener("run", (event) => {
    const page = JSON.parse(event.data);
    merge(page);
    if (!state.graph) drawRun();
    else if (page.executions.some((x) => x.id === state.graph.summary.id)) attempt(() => redraw());
  });
  events.onerror = () => { events.close(); $("live").className = ""; $("live").textContent = "○ offline"; setTimeout(follow, 2000); };
}
theme(THEMES.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "auto");
if (location.search) history.replaceState(null, "", location.pathname + location.hash);   // the token is in a cookie now
route().then(follow);
