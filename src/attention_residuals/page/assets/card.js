// card.js: what a site reads at one token, as bars: in the card beside a token, and in the panel.

const card = h("div", { class: "card", role: "tooltip", id: "card", hidden: true });

function barsOf(one, site, measure, places, most = 12) {
  const limits = page.limits[measure];
  const rows = columnsOf(one, measure)
    .map((column) => [column, one.value(measure, site, column, places)])
    .filter(([, value]) => value !== undefined);
  const size = (value) => (Number.isNaN(value) ? 0 : Math.abs(value));
  const kept = new Set([...rows].sort((a, b) => size(b[1]) - size(a[1])).slice(0, most).map(([column]) => column));
  const shown = rows.filter(([column]) => kept.has(column));
  const widest = Math.max(limits[1], ...shown.map(([, value]) => size(value)));
  const lines = shown.map(([column, value]) => {
    const bar = h("span", { class: `meter${value < 0 ? " below" : ""}`, style: { "inline-size": `${(100 * size(value)) / widest}%` } });
    return h("div", { class: `bars-row${column === state.source ? " chosen" : ""}` },
      h("span", { class: "bars-name" }, one.isOpen(site, column) && measure !== "writer" ? `${column} (open)` : column),
      h("span", { class: "bars-track", "aria-hidden": "true" }, bar),
      h("span", { class: "number" }, Number.isNaN(value) ? "\u2013" : told(value)));
  });
  const left = rows.length - shown.length;
  return h("div", { class: "bars" }, lines, left ? h("div", { class: "quiet" }, `and ${left} more, smaller`) : null);
}

function showCard(item) {
  const one = pass();
  const site = one.siteNumbers.get(state.site);
  const measure = tintMeasure();
  if (!arraysOf(measure).every((name) => one.numbers[name])) return;
  const value = tintOf(one, state.row, item.token);
  card.replaceChildren(
    h("div", { class: "card-title" }, tokenElement(one.text(state.row, item.token), 60)),
    h("div", { class: "quiet" }, `token ${item.token}, id ${one.tokens.ids[state.row][item.token]}, position ${one.tokens.positions[state.row][item.token]}`),
    state.tint === "cell" ? "" : h("div", {}, `${tintTitle()}: ${told(value)}`),
    h("div", { class: "card-site" }, `${MEASURES[measure].title} at ${state.site}`),
    barsOf(one, site, measure, [state.row * one.length + item.token], 9));
  if (!card.isConnected) document.body.append(card);
  card.hidden = false;
  item.setAttribute("aria-describedby", "card");
  const [at, size] = [item.getBoundingClientRect(), card.getBoundingClientRect()];
  const below = at.bottom + 8 + size.height <= innerHeight || at.top < size.height + 8;
  card.style.setProperty("left", `${Math.max(8, Math.min(innerWidth - size.width - 8, at.left))}px`);
  card.style.setProperty("top", `${below ? at.bottom + 8 : at.top - size.height - 8}px`);
}

function hideCard() {
  card.hidden = true;
}
