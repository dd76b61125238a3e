/* Draft trees and the table of their probabilities, from recordings (demos/recording.py). */

const ROW = 30, BOX = 24, GAP = 8, CHAR = 7.3, PHONE = 480;
const FATES = { root: "last token", kept: "accepted", rejected: "rejected", bonus: "bonus token", after: "after the end" };

/** Nodes of a pass with text, parent, level, row, fate and probabilities; the bonus token is the last one. Those that the model
    accepted after the answer's last token are "after". */
function nodesOf(lane, pass) {
  const tree = lane.trees[pass - 1], emitted = lane.emitted[pass];
  const kept = new Set(tree.path.slice(1, 1 + emitted)), after = new Set(tree.path.slice(1 + emitted));
  const nodes = tree.tokens.map((token, i) => ({
    text: visible(lane.texts[token]), parent: tree.parents[i], model: i ? tree.probs[i] : null,
    drafter: i && tree.guesses ? tree.guesses[i] : null, fate: !i ? "root" : kept.has(i) ? "kept" : after.has(i) ? "after" : "rejected",
  }));
  nodes.push({ text: visible(lane.texts[tree.bonus]), parent: tree.path.at(-1), model: tree.bonus_prob, drafter: null,
    fate: emitted < tree.path.length ? "after" : "bonus", bonus: true });
  const children = nodes.map(() => []);
  nodes.forEach((node, i) => { if (node.parent >= 0) children[node.parent].push(i); });
  let used = 0;
  let placed = 0;
  (function place(i, level) {
    Object.assign(nodes[i], { level, row: used, order: placed++ });
    children[i].forEach((child, place_) => { if (place_) used += 1; place(child, level + 1); });
  })(0, 0);
  return nodes;
}

/** Widths of the columns from level `first` on that fit, and how many of them do. */
function columns(nodes, width, first) {
  const levels = 1 + Math.max(...nodes.map((node) => node.level)), phone = width < PHONE;
  const wide = Array.from({ length: levels }, (_, level) => Math.max(...nodes.filter((node) => node.level === level)
    .map((node) => Math.min(Math.max(node.text.length * CHAR + 10, 26), 120))));
  const shown = Math.min(levels, phone ? 4 : Math.floor((width + GAP) / (36 + GAP)));
  const from = Math.max(0, Math.min(first, levels - shown)), part = wide.slice(from, from + shown);
  const room = width - GAP * (shown - 1) - 2;
  let cap = Math.max(...part);
  while (cap > 30 && part.reduce((sum, one) => sum + Math.min(one, cap), 0) > room) cap -= 1;
  return { from, shown, levels, widths: part.map((one) => Math.min(one, cap)) };
}

/** SVG of a pass. `levels`: how many levels have been drafted; `verdict`: whether the model's choice is shown. */
function drawTree(nodes, grid, title, { levels, verdict, checking }) {
  const left = grid.widths.map((_, i) => 1 + grid.widths.slice(0, i).reduce((sum, one) => sum + one + GAP, 0));
  const width = left.at(-1) + grid.widths.at(-1) + 1;
  const height = (1 + Math.max(...nodes.map((node) => node.row))) * ROW + 4;
  const svg = shape("svg", { class: `mm-tree${checking ? " checking" : ""}`, role: "img", width, height,
    viewBox: `0 0 ${width} ${height}` }, shape("title", {}, title));
  const fate = (node) => verdict || node.fate === "root" ? node.fate : "drafted";
  const shown = (node) => node.bonus ? verdict : node.level <= levels;
  const x = (level) => left[level - grid.from], wide = (level) => grid.widths[level - grid.from];
  const inside = (level) => level >= grid.from && level < grid.from + grid.shown;
  const y = (node) => node.row * ROW + BOX / 2 + 2;
  for (const node of nodes.filter(shown)) {
    const parent = nodes[node.parent];
    if (!parent || !(inside(node.level) || inside(parent.level))) continue;
    const start = inside(parent.level) ? x(parent.level) + wide(parent.level) : 0;
    const end = inside(node.level) ? x(node.level) : width, middle = (start + end) / 2;
    svg.append(shape("path", { class: ["kept", "bonus"].includes(fate(node)) ? "kept" : "left",
      d: `M${start} ${y(parent)} C${middle} ${y(parent)} ${middle} ${y(node)} ${end} ${y(node)}` }));
  }
  nodes.forEach((node, i) => {
    if (!shown(node) || !inside(node.level)) return;
    const room = Math.floor((wide(node.level) - 8) / CHAR);
    const text = node.text.length <= room ? node.text : `${node.text.slice(0, Math.max(room - 1, 1))}…`;
    const about = [node.drafter == null ? "" : `drafter ${percent(node.drafter)}`,
      node.model == null ? "" : `model ${percent(node.model)}`].filter(Boolean).join(", ");
    svg.append(shape("g", { class: fate(node), "data-node": i },
      shape("title", {}, `${node.text}: ${FATES[node.fate]}${about ? `; ${about}` : ""}`),
      shape("rect", { x: x(node.level), y: y(node) - BOX / 2, width: wide(node.level), height: BOX, rx: 6 }),
      shape("text", { x: x(node.level) + wide(node.level) / 2, y: y(node) + 4.5 }, text)));
  });
  return svg;
}

/** Table of a pass in the order of the tree: each token is followed by its continuations. */
function probabilities(nodes, caption, verdict) {
  const head = ["token", "level", "drafter", "model", "result"].map((name) => element("th", { scope: "col" }, name));
  const ordered = [...nodes.entries()].filter(([, node]) => verdict || !node.bonus).sort(([, one], [, other]) => one.order - other.order);
  const rows = ordered.map(([i, node]) => element("tr", { class: verdict ? node.fate : "", "data-node": i },
    element("th", { scope: "row", style: `--level: ${Math.min(node.level, 8)}` }, node.text),
    element("td", {}, String(node.level)), element("td", {}, percent(node.drafter)), element("td", {}, percent(node.model)),
    element("td", {}, verdict || node.fate === "root" ? FATES[node.fate] : "")));
  return element("table", { class: "mm-table mm-probabilities" }, element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
}
