/* Draft trees as nested lists, and the table of their probabilities, from recordings (demos/racing.py). */

const FATES = { root: "last token", kept: "accepted", rejected: "rejected", bonus: "bonus token", after: "after the end" };

const safe = (text) => String(text).replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt()};`);
const percent = (share) => share == null ? "" : share < 0.001 ? "< 0.1%" : share > 0.999 ? "> 99.9%" : `${(100 * share).toFixed(1)}%`;
const seconds = (time) => `${time.toFixed(2)} s`;
const count = (number, noun) => `${number || "no"} ${noun}${number === 1 ? "" : "s"}`;

/** Nodes of a pass, the bonus token last. Nodes that the model accepted after the answer's last token are "after". */
function nodesOf(lane, pass) {
  const tree = lane.trees[pass - 1], emitted = lane.emitted[pass], nodes = [];
  const add = (text, parent, model, drafter, fate) => {
    const level = parent < 0 ? 0 : nodes[parent].level + 1;
    nodes.push({ text: safe(text.trim() || JSON.stringify(text)), parent, level, model, drafter, fate });
  };
  tree.texts.forEach((text, i) => {
    const at = tree.path.indexOf(i), fate = !i ? "root" : at < 0 ? "rejected" : at <= emitted ? "kept" : "after";
    add(text, tree.parents[i], i ? tree.probs[i] : null, i ? tree.guesses?.[i] : null, fate);
  });
  add(tree.bonus_text, tree.path.at(-1), tree.bonus_prob, null, emitted < tree.path.length ? "after" : "bonus");
  return nodes;
}

function treeHtml(nodes, i = 0) {
  const { text, fate, level, drafter, model, parent } = nodes[i];
  const about = [drafter == null ? "" : `drafter ${percent(drafter)}`, model == null ? "" : `model ${percent(model)}`];
  const title = [`${text}: ${FATES[fate]}`, about.filter(Boolean).join(", ")].filter(Boolean).join("; ");
  const children = nodes.map((node, child) => node.parent === i ? treeHtml(nodes, child) : "").join("");
  return `<li class="${fate}" data-node="${i}" data-level="${level}" ${i === nodes.length - 1 ? "data-last" : ""}>
    <span title="${title}">${text}</span>${children && `<ul>${children}</ul>`}</li>`;
}

/** The table's rows are in the order of the tree's items: each token is followed by its continuations. */
function tableHtml(nodes, items, caption) {
  const head = ["token", "level", "drafter", "model", "result"].map((name) => `<th scope="col">${name}</th>`);
  const rows = [...items].map(({ dataset: { node } }) => {
    const { fate, level, text, drafter, model } = nodes[node];
    return `<tr class="${fate}" data-node="${node}"><th scope="row" style="--level: ${Math.min(level, 8)}">${text}</th>
      <td>${level}</td><td>${percent(drafter)}</td><td>${percent(model)}</td><td>${FATES[fate]}</td></tr>`;
  });
  return `<caption>${caption}</caption><thead><tr>${head.join("")}</tr></thead><tbody>${rows.join("")}</tbody>`;
}
