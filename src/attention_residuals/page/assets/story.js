// story.js: one site over all tokens. Only what is on the screen is drawn, so that long texts cost nothing.

const STORY = { cell: 26, row: 22, top: 96 };
const story = { gutter: 90 };

function storyRows(one, site) {
  return columnsOf(one, tintMeasure()).filter((column) => one.cell(tintMeasure(), site, column));
}

function storyPicture(first, last, width) {
  const one = pass();
  const site = one.siteNumbers.get(state.site);
  const measure = tintMeasure();
  const rows = storyRows(one, site);
  const limits = limitsNow(measure);
  const picture = new Picture(width, STORY.top + STORY.row * rows.length + 6);
  const { gutter } = story;
  for (let token = first; token < last; token++) {
    const x = gutter + STORY.cell * (token - first);
    const chosen = token === state.token;
    const text = short(plainToken(one.text(state.row, token), 13), 13);
    picture.text(x + STORY.cell / 2, STORY.top - 6, text, { size: 11, mono: true, turn: -90, bold: chosen, fill: tone(one.tokens.real[state.row][token] ? "ink" : "faint") });
    rows.forEach((column, r) => {
      const value = one.value(measure, site, column, [state.row * one.length + token]);
      const y = STORY.top + STORY.row * r;
      const known = !Number.isNaN(value);
      const fill = known ? colourOf(value, limits) : tone("shade");
      picture.rect(x, y, STORY.cell - 1, STORY.row - 1, { fill });
      picture.text(x + STORY.cell / 2 - 0.5, y + STORY.row / 2, brief(value), { size: 10, anchor: "center", fill: known ? inkOn(fill) : tone("ink") });
      if (chosen && column === state.source) picture.rect(x - 0.5, y - 0.5, STORY.cell, STORY.row, { stroke: tone("accent"), width: 2.5 });
    });
    if (chosen) picture.rect(x - 0.5, STORY.top - 2, STORY.cell, STORY.row * rows.length + 3, { stroke: tone("accent"), width: 1.5 });
  }
  rows.forEach((column, r) => {
    const y = STORY.top + STORY.row * r;
    picture.rect(0, y - 1, gutter - 2, STORY.row, { fill: tone("paper") });
    picture.text(gutter - 8, y + STORY.row / 2, headOf(column), { size: 12, anchor: "end", bold: column === state.source });
  });
  return picture;
}

function storyWindow() {
  const width = seenWidth(story.scroller);
  const count = Math.max(1, Math.floor((width - story.gutter) / STORY.cell));
  const first = Math.min(Math.max(0, pass().length - count), Math.ceil(story.scroller.scrollLeft / STORY.cell));
  return { first, last: Math.min(pass().length, first + count + 1), width };
}

function drawStory() {
  const one = pass();
  if (!one || !arraysOf(tintMeasure()).every((name) => one.numbers[name])) return; // paint() comes when they are
  const { first, last, width } = storyWindow();
  const picture = storyPicture(first, last, width);
  const density = devicePixelRatio || 1;
  Object.assign(story.canvas, { width: Math.round(width * density), height: Math.round(picture.height * density) });
  story.canvas.style.setProperty("inline-size", `${width}px`);
  story.canvas.style.setProperty("block-size", `${picture.height}px`);
  const context = story.canvas.getContext("2d");
  context.scale(density, density);
  draw(context, picture);
  story.spacer.style.setProperty("inline-size", `${story.gutter + STORY.cell * one.length}px`);
  story.spacer.style.setProperty("block-size", `${picture.height}px`);
}

function storyTable(first, last) {
  const one = pass();
  const site = one.siteNumbers.get(state.site);
  const rows = storyRows(one, site);
  const numbers = Array.from({ length: last - first }, (_, n) => first + n);
  return tableOf([
    ["token", "text", ...rows],
    ...numbers.map((token) => [String(token), plainToken(one.text(state.row, token), 24), ...rows.map((column) => one.value(tintMeasure(), site, column, [state.row * one.length + token]))]),
  ]);
}

function storyPlace(event) {
  const box = story.canvas.getBoundingClientRect();
  const one = pass();
  const rows = storyRows(one, one.siteNumbers.get(state.site));
  const token = storyWindow().first + Math.floor((event.clientX - box.left - story.gutter) / STORY.cell);
  const row = Math.floor((event.clientY - box.top - STORY.top) / STORY.row);
  return { token: Math.min(one.length - 1, Math.max(0, token)), source: rows[row] ?? state.source };
}

function storyKey(event) {
  const one = pass();
  const rows = storyRows(one, one.siteNumbers.get(state.site));
  const row = Math.max(0, rows.indexOf(state.source));
  const moves = {
    ArrowRight: { token: state.token + 1 }, ArrowLeft: { token: state.token - 1 }, Home: { token: 0 }, End: { token: one.length - 1 },
    ArrowDown: { source: rows[Math.min(rows.length - 1, row + 1)] }, ArrowUp: { source: rows[Math.max(0, row - 1)] },
  };
  const move = moves[event.key];
  if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  if ("token" in move) move.token = Math.min(one.length - 1, Math.max(0, move.token));
  set({ ...move, end: null, scope: "token" }, { entry: false });
}

function showChosen() {
  const { first, last } = storyWindow();
  if (state.token < first || state.token >= last - 1) story.scroller.scrollLeft = STORY.cell * Math.max(0, state.token - 3);
}

addView({
  id: "story", title: "One site, token by token",
  here: () => true,
  needs: () => arraysOf(tintMeasure()),
  build(body) {
    story.canvas = h("canvas", { "aria-hidden": "true" });
    story.spacer = h("div", { class: "story-spacer" }, story.canvas);
    story.scroller = h("div", {
      class: "story", tabindex: "0", role: "application", "aria-roledescription": "map of sources by tokens",
      onscroll: () => requestAnimationFrame(drawStory), onkeydown: storyKey,
      onclick: (event) => { if (event.target === story.canvas) set({ ...storyPlace(event), end: null, scope: "token" }); },
    }, story.spacer);
    story.legend = h("div");
    story.table = h("div", { class: "scroll" });
    story.twin = h("details", { class: "twin", ontoggle: () => this.paintTwin() }, h("summary", {}, "The same as a table"), story.table);
    story.caption = this.caption;
    story.seen = "";
    body.append(story.scroller, story.legend, story.twin);
    new ResizeObserver(() => { seenWidths.delete(story.scroller); if (story.scroller.clientWidth) drawStory(); }).observe(story.scroller);
  },
  paintTwin() {
    if (!story.twin.open) return;
    const first = Math.max(0, Math.min(state.token - 16, pass().length - 32));
    story.table.replaceChildren(storyTable(first, Math.min(pass().length, first + 32)));
  },
  paint() {
    const one = pass();
    const measure = tintMeasure();
    const site = one.siteNumbers.get(state.site);
    story.gutter = Math.min(150, 18 + Math.max(...storyRows(one, site).map((name) => widthOf(headOf(name), 12, { bold: true }))));
    const value = one.value(measure, site, state.source, [state.row * one.length + state.token]);
    story.scroller.setAttribute("aria-label", `${MEASURES[measure].title} at ${state.site}; token ${state.token}, ${plainToken(one.text(state.row, state.token), 24)}, reads ${state.source}: ${told(value)}. Arrow keys move.`);
    story.caption.textContent = `${MEASURES[measure].title} at ${state.site}${one.rows > 1 ? `, text ${state.row}` : ""}: a column for each token, a row for each source.`;
    story.legend.replaceChildren(legend(limitsNow(measure), MEASURES[measure].unit));
    const seen = `${page.shown} ${state.row} ${state.token}`;
    if (seen !== story.seen) showChosen();
    story.seen = seen;
    drawStory();
    this.paintTwin();
  },
  rows() {
    const one = pass();
    const site = one.siteNumbers.get(state.site);
    const rows = storyRows(one, site);
    return [
      ["row", "position", "token_id", "token", ...rows],
      ...one.tokens.ids[state.row].map((id, token) => [state.row, one.tokens.positions[state.row][token], id, one.tokens.texts ? one.text(state.row, token) : "",
        ...rows.map((column) => one.value(tintMeasure(), site, column, [state.row * one.length + token]))]),
    ];
  },
  picture() {
    const { first } = storyWindow();
    const last = Math.min(pass().length, first + 64);
    const inner = storyPicture(first, last, Math.max(420, story.gutter + STORY.cell * (last - first) + 8));
    const picture = new Picture(inner.width, inner.height + 70);
    picture.text(12, 18, `${MEASURES[tintMeasure()].title} at ${state.site}, tokens ${first} to ${last - 1}`, { size: 14, bold: true });
    const moved = (point) => [point[0], point[1] + 24];
    picture.shapes.push(...inner.shapes.map((shape) => (shape.points ? { ...shape, points: shape.points.map(moved) } : { ...shape, y: shape.y + 24 })));
    drawScale(picture, 70, inner.height + 40, limitsNow(tintMeasure()), MEASURES[tintMeasure()].unit);
    return picture;
  },
});
