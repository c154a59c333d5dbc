// map.js: sites by sources. Every cell is a cell of a grid that a keyboard and a screen reader can walk.

const KINDS = { attention: "Attention sites", mlp: "MLP sites", output: "Output" };

// The rows of the map, in groups: one, or one for each kind of site.
function groupsOf(one) {
  const all = one.sites.map((_, number) => number);
  if (state.layout === "together") return [{ name: "", sites: all }];
  return Object.entries(KINDS)
    .map(([kind, name]) => ({ name, sites: all.filter((number) => one.sites[number].kind === kind) }))
    .filter((group) => group.sites.length);
}

const headOf = (name) => name.replace(/\.attention/, ".attn");

// Builds a grid; paint(values) fills it. values(site, column) is a cell: {value, fill, text, label, hatch, open, note}.
class Grid {
  constructor(one, sites, columns, { label, choose = null }) {
    Object.assign(this, { one, sites, columns, choose, cells: [], rows: [], place: [0, 0] });
    const heads = columns.map((column) => h("th", { scope: "col", class: "turn" }, h("span", {}, headOf(column))));
    const body = sites.map((site, r) => {
      const cells = columns.map((_, c) => h("td", { role: "gridcell", tabindex: "-1", "data-r": r, "data-c": c }));
      this.cells.push(cells);
      const head = h("th", { scope: "row" }, headOf(one.sites[site].name));
      this.rows.push(head);
      return h("tr", { class: `kind-${one.sites[site].kind}` }, head, cells);
    });
    this.element = h("table", { class: `map ${columns.length <= 6 ? "few" : columns.length <= 14 ? "some" : "many"}`, role: choose ? "grid" : "table", "aria-label": label },
      h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "corner" }, "site"), heads)), h("tbody", {}, body));
    if (!choose) this.cells.flat().forEach((cell) => { cell.removeAttribute("tabindex"); cell.removeAttribute("role"); });
    if (choose) {
      this.element.addEventListener("click", (event) => this.clicked(event));
      this.element.addEventListener("keydown", (event) => this.key(event));
    }
  }

  paint(values) {
    this.sites.forEach((site, r) => this.columns.forEach((column, c) => {
      const cell = this.cells[r][c];
      const one = values(site, column);
      cell.className = `${one.hatch ? "none" : ""}${one.open ? " open" : ""}${one.note ? " noted" : ""}`;
      cell.style.setProperty("background-color", one.fill ?? "");
      cell.style.setProperty("color", one.fill ? inkOn(one.fill) : "");
      if (cell.textContent !== one.text) cell.textContent = one.text;
      cell.setAttribute("aria-label", one.label);
      cell.title = one.label;
    }));
  }

  // Marks the chosen cell and the chosen site; the chosen cell is where Tab goes.
  select(site, column) {
    const [r, c] = [this.sites.indexOf(site), this.columns.indexOf(column)];
    this.rows.forEach((head, n) => head.classList.toggle("chosen", n === r));
    this.cells.flat().forEach((cell) => cell.removeAttribute("aria-selected"));
    this.cells[this.place[0]]?.[this.place[1]]?.setAttribute("tabindex", "-1");
    if (r >= 0 && c >= 0) {
      this.cells[r][c].setAttribute("aria-selected", "true");
      this.place = [r, c];
    }
    this.cells[this.place[0]]?.[this.place[1]]?.setAttribute("tabindex", "0");
  }

  clicked(event) {
    const cell = event.target.closest("td");
    const head = event.target.closest("tbody th");
    if (cell) { cell.focus(); this.choose(this.sites[+cell.dataset.r], this.columns[+cell.dataset.c], true); }
    else if (head) this.choose(this.sites[this.rows.indexOf(head)], this.columns[this.place[1]], true);
  }

  key(event) {
    const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0], Home: [0, -1e9], End: [0, 1e9], PageUp: [-1e9, 0], PageDown: [1e9, 0] };
    const move = moves[event.key];
    if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const within = (number, count) => Math.min(count - 1, Math.max(0, number));
    const [r, c] = [within(this.place[0] + move[0], this.sites.length), within(this.place[1] + move[1], this.columns.length)];
    this.select(this.sites[r], this.columns[c]);
    this.cells[r][c].focus();
    this.choose(this.sites[r], this.columns[c], false);
  }
}

// A cell of the map as it is shown.
function mapCell(one, measure, site, column, places, limits) {
  const value = one.value(measure, site, column, places);
  const name = one.sites[site].name;
  const absent = measure === "writer" ? value === undefined : !one.columns[site].has(column);
  const known = value !== undefined && !Number.isNaN(value);
  const open = measure !== "writer" && one.isOpen(site, column);
  return {
    value, open,
    text: absent ? "" : brief(value ?? NaN),
    fill: known ? colourOf(value, limits) : null,
    hatch: absent,
    label: `${name} reads ${column}${open ? " (open block)" : ""}: ${!absent && value === undefined ? "not measured" : told(value)}`,
  };
}

const map = { key: "", grids: [] };

const averageText = (one, measure) => (measure === "effect" ? "mean over the texts that were swept" : scopeText(one));

function paintMap() {
  const one = pass();
  const columns = columnsOf(one, state.measure);
  const key = `${page.shown} ${state.trace} ${state.layout} ${state.measure === "writer"}`;
  if (key !== map.key) {
    map.key = key;
    map.grids = groupsOf(one).map((group) => [group.name, new Grid(one, group.sites, columns, {
      label: `${group.name || "Sites"} by source`,
      choose: (site, source, entry) => set({ site: one.sites[site].name, source }, { entry }),
    })]);
    map.body.replaceChildren(...map.grids.map(([name, grid]) =>
      h("div", { class: "map-part" }, name ? h("h3", {}, name) : null, h("div", { class: "scroll" }, grid.element))));
  }
  const places = one.places(state);
  const limits = limitsNow(state.measure);
  for (const [, grid] of map.grids) {
    grid.paint((site, column) => mapCell(one, state.measure, site, column, places, limits));
    grid.select(one.siteNumbers.get(state.site), state.source);
  }
  map.caption.textContent = `${MEASURES[state.measure].title}, ${averageText(one, state.measure)}. Rows read, columns are read.`;
  map.legend.replaceChildren(legend(limits, MEASURES[state.measure].unit, [
    keyOf("none", "not a source here"), state.measure === "writer" ? null : keyOf("open", "block still open"),
  ]));
}

addView({
  id: "map", title: "Where each site reads",
  here: () => true,
  needs: () => arraysOf(state.measure),
  build(body) {
    map.key = "";
    map.tools = h("div", { class: "bar" });
    map.body = h("div", { class: "map-parts" });
    map.legend = h("div");
    map.caption = this.caption;
    body.append(map.tools, map.body, map.legend);
  },
  paint() {
    map.tools.replaceChildren(
      choice("Sites", [["together", "together"], ["apart", "apart"]], state.layout, (layout) => set({ layout })),
      choice("Colours", [["full", "full range"], ["fit", "fitted"]], state.range, (range) => set({ range })));
    paintMap();
  },
  rows() {
    const one = pass();
    const places = one.places(state);
    const head = ["site", "part", "source", "open", "measure", "tokens", "value"];
    const lines = one.sites.flatMap((site, number) => columnsOf(one, state.measure).map((column) => {
      const value = one.value(state.measure, number, column, places);
      return value === undefined ? null : [site.site, site.part, column, one.isOpen(number, column) ? 1 : 0, state.measure, averageText(one, state.measure), value];
    }));
    return [head, ...lines.filter(Boolean)];
  },
  picture() {
    const one = pass();
    const places = one.places(state);
    const limits = limitsNow(state.measure);
    const columns = columnsOf(one, state.measure);
    const groups = groupsOf(one).map((group) => ({
      name: group.name,
      rows: group.sites.map((site) => ({ name: one.sites[site].name, cells: columns.map((column) => mapCell(one, state.measure, site, column, places, limits)) })),
    }));
    return cellPicture({ title: map.caption.textContent, columns, groups, limits, unit: MEASURES[state.measure].unit });
  },
});
