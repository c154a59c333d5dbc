// panel.js: the selected cell in all its numbers, what the site reads, and what the model predicts there.

const panel = {};

// A source that is no writer has no writer weight.
const cellMeasures = (one) => measuresHere().filter((measure) => measure !== "writer" || one.writers.includes(state.source));

function panelNumbers(one, site, places) {
  const rows = cellMeasures(one).map((measure) => {
    const value = one.value(measure, site, state.source, places);
    return [MEASURES[measure].title, measure === "effect" && value === undefined ? "not measured" : told(value), measure === state.measure];
  });
  const statistics = Object.keys(STATISTICS).filter((name) => name !== "writer_norm")
    .map((name) => [STATISTICS[name].title, told(one.mean(name, site, places)), false]);
  const lines = (list) => list.map(([name, value, chosen]) => h("div", { class: chosen ? "chosen" : null }, h("dt", {}, name), h("dd", { class: "number" }, value)));
  return [
    h("h3", {}, `${state.source} in ${state.site}`), h("dl", { class: "facts" }, lines(rows)),
    h("h3", {}, `The site ${state.site}`), h("dl", { class: "facts" }, lines(statistics)),
  ];
}

function likeliestList(list) {
  return h("ol", { class: "likeliest" }, list.map(({ text, probability }) =>
    h("li", {}, h("span", { class: "bars-track", "aria-hidden": "true" }, h("span", { class: "meter", style: { "inline-size": `${100 * probability}%` } })),
      tokenElement(text, 24), h("span", { class: "number" }, percent(probability)))));
}

function panelPredictions() {
  const lists = page.passes.slice(0, 2).filter((one) => one.numbers["predictions.top_tokens"]).map((one) => {
    const aligned = one === pass() || (page.pair?.aligned && state.token < one.length);
    return aligned ? h("div", {}, page.passes.length > 1 ? h("h4", {}, one.name) : null, likeliestList(one.likeliest("predictions", 0, state.row, state.token))) : null;
  }).filter(Boolean);
  if (!lists.length) return [];
  return [h("h3", {}, "Next token after ", tokenElement(pass().text(state.row, state.token), 24)), h("div", { class: "side-by-side" }, lists)];
}

function panelActions() {
  const actions = describeCell ? describeCell(detail()) : [];
  return actions.length ? h("div", { class: "bar actions", role: "group", "aria-label": "Change the selected cell" },
    actions.map(({ label, run }) => h("button", { type: "button", onclick: run }, label))) : null;
}

addView({
  id: "panel", title: "Selected",
  here: () => true,
  needs: (one) => [
    ...measuresHere().flatMap(arraysOf), ...Object.keys(STATISTICS),
    ...(one.predictions ? ["predictions.top_tokens", "predictions.top_probabilities"] : []),
  ],
  build(body) {
    panel.body = body;
    panel.caption = this.caption;
  },
  paint() {
    const one = pass();
    const site = one.siteNumbers.get(state.site);
    const places = one.places(state);
    panel.caption.textContent = scopeText(one);
    const merged = one.sites[site].merged.map(([name, into]) => `${name} holds the same numbers as ${into} here, and is shown with it.`);
    panel.body.replaceChildren(...[
      panelActions(), ...panelNumbers(one, site, places),
      h("h3", {}, `What ${state.site} reads`), barsOf(one, site, tintMeasure(), places),
      ...merged.map((text) => h("p", { class: "quiet" }, text)), ...panelPredictions(),
    ].filter(Boolean));
  },
  rows() {
    const one = pass();
    const site = one.siteNumbers.get(state.site);
    const places = one.places(state);
    return [
      ["site", "source", "number", "tokens", "value"],
      ...cellMeasures(one).map((measure) => [state.site, state.source, measure, averageText(one, measure), one.value(measure, site, state.source, places)]),
      ...Object.keys(STATISTICS).filter((name) => name !== "writer_norm").map((name) => [state.site, "", name, scopeText(one), one.mean(name, site, places)]),
    ];
  },
  picture() {
    const rows = this.rows().slice(1);
    const picture = new Picture(520, 60 + 22 * rows.length);
    picture.text(12, 20, `${state.source} in ${state.site}, ${scopeText()}`, { size: 14, bold: true });
    rows.forEach(([, source, name, , value], n) => {
      picture.text(12, 54 + 22 * n, (MEASURES[name] ?? STATISTICS[name]).title + (source ? "" : " of the site"));
      picture.text(508, 54 + 22 * n, told(value), { anchor: "end" });
    });
    return picture;
  },
});
