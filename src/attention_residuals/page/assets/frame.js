// frame.js: what all views have in common: a heading, files to take away, a legend.

const views = [];

// A view: {id, title, note, here(), needs(one), build(body), paint(), picture(), rows()}; rows are those of the
// CSV file, the picture that of PNG and SVG.
function addView(view) {
  views.push(view);
}

function framed(view) {
  const words = (text) => text.replaceAll(/[^\w.]/g, "_");
  const name = () => [view.id, words(state.site), state.scope === "token" ? `token${state.token}` : state.scope, ...(page.passes.length > 1 ? [words(pass().name)] : [])].join("-");
  const files = [
    ["PNG", () => savePng(`${name()}.png`, withOrigin(view.picture()))],
    ["SVG", () => saveSvg(`${name()}.svg`, withOrigin(view.picture()))],
    ["CSV", () => save(`${name()}.csv`, csvText(view.rows()), "text/csv;charset=utf-8")],
  ];
  const buttons = files.map(([kind, run]) =>
    h("button", { type: "button", class: "file", "aria-label": `Save ${view.title.toLowerCase()} as ${kind}`, onclick: run }, kind));
  view.body = h("div", { class: "body" });
  view.caption = h("p", { class: "quiet caption" });
  view.section = h("section", { class: `view view-${view.id}`, id: view.id, "aria-labelledby": `${view.id}-title` },
    h("div", { class: "title" }, h("h2", { id: `${view.id}-title` }, view.title), h("div", { class: "files", role: "group", "aria-label": "Save this view" }, buttons)),
    view.caption, view.body);
  view.build(view.body);
  return view.section;
}

// A picture that leaves the page says below what it is from; the numbers of tokens are those of the averages.
function originText() {
  const { name, about, rows, real } = pass();
  const count = real.reduce((sum, row) => sum + row.length, 0);
  const tokens = `n = ${count.toLocaleString("en")} token${count === 1 ? "" : "s"}${rows > 1 ? ` of ${rows} texts` : ""}, padding and special tokens left out`;
  const checkpoint = about.checkpoint && `checkpoint ${about.checkpoint.slice(0, 12)}`;
  return [page.passes.length > 1 && name, tokens, about.dtype?.replace("torch.", ""), checkpoint].filter(Boolean).join("; ");
}

function withOrigin(inner) {
  const text = originText();
  const picture = new Picture(Math.max(inner.width, widthOf(text, 11) + 24), inner.height + 24);
  picture.shapes.push(...inner.shapes);
  picture.text(12, inner.height + 8, text, { size: 11, fill: tone("faint") });
  return picture;
}

// "mean of 31 real tokens of text 0", "token 5 'the'".
function scopeText(one = pass()) {
  if (state.scope === "token" && state.end === null) return `token ${state.token}, ${plainToken(one.text(state.row, state.token), 24)}`;
  const count = one.places(state).length;
  const where = { token: "the chosen span", text: one.rows > 1 ? `text ${state.row}` : "the text", all: one.rows > 1 ? `${one.rows} texts` : "the text" };
  return `mean of ${count.toLocaleString("en")} token${count === 1 ? "" : "s"} of ${where[state.scope]}`;
}

// The limits of a measure's colours now: in full, or fitted to the largest mean at a site that has a choice.
function limitsNow(measure) {
  const full = page.limits[measure];
  if (state.range === "full") return full;
  const key = `${measure} fitted`;
  page.limits[key] ??= fitted(measure, full);
  return page.limits[key];
}

function fitted(measure, [low, high]) {
  let most = 0;
  for (const one of page.passes) {
    const places = one.places({ ...state, scope: "all" });
    one.sites.forEach((site, number) => {
      if (site.sources.length < 2) return;
      for (const column of columnsOf(one, measure)) {
        const size = Math.abs(one.value(measure, number, column, places));
        if (size > most) most = size;
      }
    });
  }
  const top = Math.min(high, most) || high;
  return [low < 0 ? -top : 0, top];
}

// The legend of a scale, as an element.
function legend([low, high], unit, extra = []) {
  const canvas = h("canvas", { width: 240, height: 20, class: "scale", "aria-hidden": "true" });
  const context = canvas.getContext("2d");
  for (let x = 0; x < 240; x++) {
    context.fillStyle = colourOf(low + ((high - low) * (x + 0.5)) / 240, [low, high]);
    context.fillRect(x, 0, 1, 20);
  }
  return h("div", { class: "legend" }, h("span", {}, told(low)), canvas, h("span", {}, `${told(high)} ${unit}`), extra);
}

const keyOf = (kind, text) => h("span", { class: "key" }, h("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), text);

// A picture of a table of cells: {title, columns, groups: [{name, rows: [{name, cells}]}], limits, unit}; a cell is
// {text, fill, hatch, open, faint}.
function cellPicture({ title, columns, groups, limits, unit, cell = 40 }) {
  const side = 24 + Math.max(...groups.flatMap((group) => group.rows.map((row) => widthOf(row.name, 12))), 20);
  const tallest = Math.max(...columns.map((name) => widthOf(name, 11)));
  const turned = tallest > cell - 4;
  const top = 44 + (turned ? tallest + 10 : 22);
  const count = groups.reduce((sum, group) => sum + group.rows.length + (group.name ? 1 : 0), 0);
  const width = Math.max(side + cell * columns.length + 16, widthOf(title, 14, { bold: true }) + 32, 320);
  const picture = new Picture(width, top + 24 * count + (limits ? 52 : 16));
  picture.text(12, 20, title, { size: 14, bold: true });
  columns.forEach((name, n) => {
    const x = side + cell * n + cell / 2;
    picture.text(x, top - 10, name, turned ? { size: 11, turn: -90 } : { size: 11, anchor: "center" });
  });
  let y = top;
  for (const group of groups) {
    if (group.name) { picture.text(12, y + 12, group.name, { size: 12, bold: true }); y += 24; }
    for (const row of group.rows) {
      picture.text(side - 8, y + 12, row.name, { size: 12, anchor: "end" });
      row.cells.forEach((one, n) => drawCell(picture, one, side + cell * n, y, cell));
      y += 24;
    }
  }
  if (limits) drawScale(picture, side, y + 16, limits, unit);
  return picture;
}

function drawCell(picture, one, x, y, width) {
  picture.rect(x, y, width - 1, 23, one.hatch ? { hatch: tone("line") } : { fill: one.fill });
  if (one.open) picture.rect(x + 2, y + 2, width - 5, 19, { stroke: one.fill ? inkOn(one.fill) : tone("ink"), dash: [3, 2] });
  const ink = one.fill ? inkOn(one.fill) : tone("ink");
  if (one.text) picture.text(x + width / 2, y + 12, one.text, { size: 11, anchor: "center", fill: ink });
}

function drawScale(picture, x, y, [low, high], unit) {
  for (let n = 0; n < 60; n++) picture.rect(x + 2 * n, y, 2.2, 12, { fill: colourOf(low + ((high - low) * (n + 0.5)) / 60, [low, high]) });
  picture.text(x - 6, y + 6, told(low), { size: 11, anchor: "end" });
  picture.text(x + 126, y + 6, `${told(high)} ${unit}`, { size: 11 });
}
