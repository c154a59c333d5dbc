// profile.js: one number for each site, over depth; attention, MLP and output sites by the form of their marks.

const FORMS = { attention: "circle", mlp: "square", output: "diamond", embedding: "diamond" };
const PANEL = { width: 380, height: 200, left: 46, right: 14, top: 34, bottom: 34 };
const profile = {};

// The points of one panel: [{name, kind, values: [one for each pass]}].
function profilePoints(name) {
  const passes = page.passes.slice(0, 2);
  const [one] = passes;
  const values = (placeOf) => passes.map((each) => {
    const number = placeOf(each) ?? -1;
    return number < 0 ? NaN : each.mean(name, number, each.places(scopeFor(each)));
  });
  // By name: another model may have other sites and writers at the same places.
  if (name === "writer_norm") {
    return one.writers.map((writer) => ({ name: writer, kind: writer.split(".").pop(), values: values((each) => each.writers.indexOf(writer)) }));
  }
  return one.sites.map((site) => ({ name: site.name, kind: site.kind, values: values((each) => each.siteNumbers.get(site.name)) }));
}

// A pass that is shorter than the chosen one is averaged as a whole.
const scopeFor = (one) => (state.row < one.rows && state.token < one.length && (state.end ?? 0) < one.length ? state : { ...state, row: 0, scope: "all" });

function niceTop(number) {
  if (!(number > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(number));
  return [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].map((step) => step * unit).find((top) => top >= number * 0.999);
}

function profilePanel(picture, name, left, top) {
  const points = profilePoints(name);
  const statistic = STATISTICS[name];
  const [width, height] = [PANEL.width - PANEL.left - PANEL.right, PANEL.height - PANEL.top - PANEL.bottom];
  const most = statistic.fixed?.[1] ?? niceTop(Math.max(...points.flatMap((point) => point.values.filter((value) => !Number.isNaN(value)))));
  const x = (n) => left + PANEL.left + (points.length === 1 ? width / 2 : (width * n) / (points.length - 1));
  const y = (value) => top + PANEL.top + height * (1 - Math.min(1, value / most));
  picture.text(left + 8, top + 16, `${statistic.title}, ${statistic.unit}`, { size: 13, bold: true });
  for (const share of [0, 0.5, 1]) {
    picture.line([[left + PANEL.left, y(most * share)], [left + PANEL.left + width, y(most * share)]], { stroke: tone("line") });
    picture.text(left + PANEL.left - 8, y(most * share), told(most * share), { size: 11, anchor: "end", fill: tone("faint") });
  }
  const step = Math.ceil(points.length / 6);
  points.forEach((point, n) => {
    if (n % step && n !== points.length - 1) return;
    if (n !== points.length - 1 && points.length - 1 - n < step) return;
    picture.text(x(n), top + PANEL.height - 16, shortName(point.name), { size: 11, anchor: "center", fill: tone("faint") });
  });
  if (points.every((point) => point.values.every(Number.isNaN))) {
    picture.text(left + PANEL.left + width / 2, top + PANEL.top + height / 4, "not defined here", { size: 12, anchor: "center", fill: tone("faint") });
    return;
  }
  const chosen = points.findIndex((point) => point.name === state.site);
  if (chosen >= 0) picture.line([[x(chosen), y(0)], [x(chosen), y(most)]], { stroke: tone("accent"), width: 1.5, dash: [4, 3] });
  page.passes.slice(0, 2).forEach((_, number) => {
    const known = points.map((point, n) => [n, point]).filter(([, point]) => !Number.isNaN(point.values[number]));
    const colour = tone(number ? "second" : "first");
    picture.line(known.map(([n, point]) => [x(n), y(point.values[number])]), { stroke: colour, width: 1.3, dash: number ? [5, 3] : undefined });
    for (const [n, point] of known) picture.mark(x(n), y(point.values[number]), FORMS[point.kind], { stroke: colour, fill: number ? undefined : colour });
  });
}

const shortName = (name) => name.replace(".attention", "a").replace(".mlp", "m").replace("embedding", "emb").replace("output", "out");

function profilePicture(across) {
  const names = Object.keys(STATISTICS);
  const picture = new Picture(PANEL.width * across, PANEL.height * Math.ceil(names.length / across) + 34);
  names.forEach((name, n) => profilePanel(picture, name, PANEL.width * (n % across), PANEL.height * Math.floor(n / across)));
  let x = 12;
  const y = picture.height - 16;
  const entries = [["circle", "attention"], ["square", "MLP"], ["diamond", "output, embedding"]];
  for (const [form, text] of entries) {
    picture.mark(x + 4, y, form, { stroke: tone("first"), fill: tone("first") });
    picture.text(x + 16, y, text);
    x += 34 + widthOf(text, 12);
  }
  if (page.passes.length > 1) {
    page.passes.slice(0, 2).forEach((one, number) => {
      picture.line([[x, y], [x + 26, y]], { stroke: tone(number ? "second" : "first"), width: 1.6, dash: number ? [5, 3] : undefined });
      picture.text(x + 32, y, one.name);
      x += 50 + widthOf(one.name, 12);
    });
  }
  return picture;
}

function profileRows() {
  const names = Object.keys(STATISTICS);
  const passes = page.passes.slice(0, 2);
  const heads = names.flatMap((name) => passes.map((one) => (passes.length > 1 ? `${name} ${one.name}` : name)));
  const all = names.map(profilePoints);
  const places = [...new Set(all.flatMap((points) => points.map((point) => point.name)))];
  const value = (points, place) => points.find((point) => point.name === place)?.values ?? passes.map(() => null);
  return [["place", ...heads], ...places.map((place) => [place, ...all.flatMap((points) => value(points, place))])];
}

addView({
  id: "profile", title: "Over depth",
  here: () => true,
  needs: () => Object.keys(STATISTICS),
  build(body) {
    profile.panels = h("div", { class: "panels", role: "img" });
    profile.table = h("div", { class: "scroll" });
    profile.twin = h("details", { class: "twin", ontoggle: () => this.paintTwin() }, h("summary", {}, "The same as a table"), profile.table);
    profile.caption = this.caption;
    body.append(profile.panels, profile.twin);
  },
  paintTwin() {
    if (!profile.twin.open) return;
    const rows = profileRows();
    const heads = rows[0].map((head) => head.replace(/^\w+/, (name) => STATISTICS[name]?.title ?? name));
    profile.table.replaceChildren(tableOf([heads, ...rows.slice(1)]));
  },
  paint() {
    profile.panels.setAttribute("aria-label", "Six numbers over depth; the same numbers are in the table below.");
    profile.caption.textContent = `A mark for each site in the order in which they read, ${scopeText()}. The dashed line is the selected site.`;
    const pictures = Object.keys(STATISTICS).map((name) => {
      const picture = new Picture(PANEL.width, PANEL.height);
      profilePanel(picture, name, 0, 0);
      return svgOf(picture);
    });
    profile.panels.replaceChildren(...pictures, profileKey());
    this.paintTwin();
  },
  rows: profileRows,
  picture: () => profilePicture(2),
});

function profileKey() {
  const mark = (form) => {
    const picture = new Picture(14, 14);
    picture.mark(7, 7, form, { stroke: tone("first"), fill: tone("first") });
    return svgOf(picture);
  };
  const dash = (number) => {
    const picture = new Picture(28, 14);
    picture.line([[0, 7], [28, 7]], { stroke: tone(number ? "second" : "first"), width: 1.6, dash: number ? [5, 3] : undefined });
    return svgOf(picture);
  };
  const passes = page.passes.length > 1 ? page.passes.slice(0, 2).map((one, n) => h("span", { class: "key" }, dash(n), one.name)) : [];
  return h("div", { class: "legend" },
    [["circle", "attention"], ["square", "MLP"], ["diamond", "output, embedding"]].map(([form, text]) => h("span", { class: "key" }, mark(form), text)), passes);
}
