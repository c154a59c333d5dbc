// tables.js: what edits did: the receipts of those that were made, and the effects of those of a sweep.

const tables = {};
const MOST_EFFECTS = 15;

const receiptRows = () => [
  ["edit", "fired", "tokens", "places", "largest weight change", "largest state change"],
  ...page.payload.receipts.map((one) => [one.edit, one.fired, one.tokens, one.places.join(", "), one.largest_weight_change, one.largest_state_change]),
];

const effectRows = () => [
  ["edit", "KL, nats", "loss change, nats per token"],
  ...[...page.payload.effects].sort((a, b) => (b.divergence ?? Infinity) - (a.divergence ?? Infinity)).map((one) => [one.edits.join("; "), one.divergence, one.loss]),
];

function tablePicture(title, rows) {
  const widths = rows[0].map((_, n) => 24 + Math.min(420, Math.max(...rows.map((row) => widthOf(String(typeof row[n] === "number" ? told(row[n]) : row[n] ?? ""), 12)))));
  const picture = new Picture(widths.reduce((sum, width) => sum + width, 24), 52 + 22 * rows.length);
  picture.text(12, 20, title, { size: 14, bold: true });
  rows.forEach((row, r) => {
    let x = 12;
    row.forEach((cell, n) => {
      picture.text(x, 52 + 22 * r, typeof cell === "number" ? told(cell) : plainToken(cell ?? "", 64).replaceAll("\u2423", " "), { bold: r === 0 });
      x += widths[n];
    });
  });
  return picture;
}

addView({
  id: "edits", title: "Interventions and their receipts",
  here: () => page.payload.receipts.length > 0,
  needs: () => [],
  build(body) {
    tables.receipts = h("div", { class: "scroll" });
    body.append(tables.receipts);
  },
  paint() {
    this.caption.textContent = "What each edit did: how often it acted, where, and its largest change of a weight (absolute) and of a state (of its length).";
    tables.receipts.replaceChildren(tableOf(receiptRows()));
  },
  rows: receiptRows,
  picture: () => tablePicture("Interventions and their receipts", receiptRows()),
});

addView({
  id: "effects", title: "Effects of a sweep",
  here: () => page.payload.effects.length > 0,
  needs: () => [],
  build(body) {
    tables.effects = h("div", { class: "scroll" });
    body.append(tables.effects);
  },
  paint() {
    const rows = effectRows();
    const left = rows.length - 1 - MOST_EFFECTS;
    this.caption.textContent = `Each edit made alone: how far predictions move (KL) and what that does to the loss (above 0 it hurts). ${left > 0 ? `The ${MOST_EFFECTS} largest; all ${rows.length - 1} are in the CSV file.` : ""}`;
    tables.effects.replaceChildren(tableOf(rows.slice(0, MOST_EFFECTS + 1)));
  },
  rows: effectRows,
  picture: () => tablePicture("Effects of a sweep", effectRows().slice(0, MOST_EFFECTS + 1)),
});
