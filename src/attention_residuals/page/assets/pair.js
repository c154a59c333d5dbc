// pair.js: two passes side by side and their difference, with what a change that means nothing does.

const pairView = { key: "", grids: [] };

// Differences compare the same token of both where they are aligned, and averages otherwise.
function pairScope() {
  return page.pair.aligned ? state : { ...state, row: 0, scope: "all" };
}

const pairMeasure = () => (state.measure === "effect" ? "weight" : state.measure);

function pairColumns() {
  const [a, b] = page.passes;
  return [...new Set([...columnsOf(a, pairMeasure()), ...columnsOf(b, pairMeasure())])];
}

function valueIn(one, name, column) {
  const site = one.siteNumbers.get(name);
  if (site === undefined) return undefined;
  const scope = pairScope();
  return one.value(pairMeasure(), site, column, one.places(scope === state ? state : scope));
}

// B - A of a cell, and whether the control moves it as far.
function difference(name, column) {
  const [a, b, control] = page.passes;
  const [before, after] = [valueIn(a, name, column), valueIn(b, name, column)];
  if (before === undefined || after === undefined) return { value: undefined, within: false };
  const value = after - before;
  const apart = control && valueIn(control, name, column);
  return { value, within: apart !== undefined && Math.abs(value) <= Math.abs(apart - before) };
}

// Fixed for the page: those of means, and those of single tokens, which differ more.
function differenceLimits() {
  const single = page.pair.aligned && state.scope === "token" && state.end === null;
  const key = `difference ${pairMeasure()} ${single}`;
  page.limits[key] ??= niceTop(single ? largestDifference() : largestMeanDifference());
  return [-page.limits[key], page.limits[key]];
}

function largestMeanDifference() {
  const before = { ...state };
  Object.assign(state, { scope: "all" });
  const found = page.passes[0].sites.flatMap((site) => pairColumns().map((column) => Math.abs(difference(site.name, column).value)));
  Object.assign(state, before);
  return Math.max(0, ...found.filter((value) => value >= 0));
}

function largestDifference() {
  const [a, b] = page.passes;
  let most = 0;
  for (const site of a.sites) {
    for (const column of pairColumns()) {
      const cells = [a, b].map((one) => one.cell(pairMeasure(), one.siteNumbers.get(site.name), column));
      if (!cells[0] || !cells[1]) continue;
      for (const flat of a.places({ ...state, scope: "all" })) {
        const apart = Math.abs(b.mean(...cells[1], [flat]) - a.mean(...cells[0], [flat]));
        if (apart > most) most = apart;
      }
    }
  }
  return most;
}

function differenceCell(name, column, limits) {
  const { value, within } = difference(name, column);
  const absent = value === undefined;
  const known = !absent && !Number.isNaN(value);
  const text = known ? (value > 0 && brief(value) !== "0" ? `+${brief(value)}` : brief(value)) : brief(value);
  return {
    value, text: within ? `(${text})` : text, fill: known ? colourOf(value, limits) : null, hatch: absent, note: within,
    label: `${name} reads ${column}: ${absent ? "not in both" : `difference ${told(value)}`}${within ? ", no more than the control" : ""}`,
  };
}

const pairNames = () => page.passes.map((one) => one.name);

function pairParts() {
  const [a, b] = page.passes;
  const columns = pairColumns();
  const sites = a.sites.map((_, number) => number);
  const limits = limitsNow(pairMeasure());
  const own = (one) => (site, column) => {
    const number = one.siteNumbers.get(a.sites[site].name);
    return number === undefined ? { text: "", hatch: true, label: "no such site" } : mapCell(one, pairMeasure(), number, column, one.places(pairScope()), limits);
  };
  return { columns, sites, limits, cells: [own(a), own(b), (site, column) => differenceCell(a.sites[site].name, column, differenceLimits())] };
}

addView({
  id: "pair", title: "Two passes compared",
  here: () => page.passes.length > 1,
  needs: () => arraysOf(pairMeasure()),
  build(body) {
    pairView.key = "";
    pairView.maps = h("div", { class: "map-parts" });
    pairView.legend = h("div");
    pairView.caption = this.caption;
    body.append(pairView.maps, pairView.legend);
  },
  paint() {
    const [a] = page.passes;
    const { columns, sites, limits, cells } = pairParts();
    const [first, second] = pairNames();
    const titles = [first, second, `${second} less ${first}`];
    const key = `${page.shown} ${pairMeasure() === "writer"}`;
    if (key !== pairView.key) {
      pairView.key = key;
      pairView.grids = titles.map((title) => new Grid(a, sites, columns, {
        label: title, choose: (site, source, entry) => set({ trace: 0, site: a.sites[site].name, source: columnsOf(a, state.measure).includes(source) ? source : state.source }, { entry }),
      }));
      pairView.maps.replaceChildren(...titles.map((title, n) => h("div", { class: "map-part" }, h("h3", {}, title), h("div", { class: "scroll" }, pairView.grids[n].element))));
    }
    pairView.grids.forEach((grid, n) => { grid.paint(cells[n]); grid.select(a.siteNumbers.get(state.site) ?? 0, state.source); });
    pairView.caption.textContent = `${MEASURES[pairMeasure()].title}, ${page.pair.aligned ? scopeText(a) : `means over each text, which do not align token by token (${page.pair.why})`}.`;
    const unit = MEASURES[pairMeasure()].unit;
    pairView.legend.replaceChildren(legend(limits, unit), legend(differenceLimits(), `${unit}, difference`, page.passes[2] ? [keyOf("noted", "(in brackets): the control moves it as far")] : []));
  },
  rows() {
    const [a, b, control] = page.passes;
    const head = ["site", "source", "measure", ...pairNames().slice(0, 2), "difference", ...(control ? ["control", "within_control"] : [])];
    const lines = a.sites.flatMap((site) => pairColumns().map((column) => {
      const { value, within } = difference(site.name, column);
      return value === undefined ? null : [site.name, column, pairMeasure(), valueIn(a, site.name, column), valueIn(b, site.name, column), value, ...(control ? [valueIn(control, site.name, column), within ? 1 : 0] : [])];
    }));
    return [head, ...lines.filter(Boolean)];
  },
  picture() {
    const [a] = page.passes;
    const { columns, sites, cells } = pairParts();
    const [first, second] = pairNames();
    const groups = [first, second, `${second} less ${first}`].map((name, n) => ({ name, rows: sites.map((site) => ({ name: a.sites[site].name, cells: columns.map((column) => cells[n](site, column)) })) }));
    return cellPicture({ title: pairView.caption.textContent, columns, groups, limits: differenceLimits(), unit: "difference", cell: 46 });
  },
});
