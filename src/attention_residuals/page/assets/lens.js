// lens.js: what the model would predict at each site on its way, for the selected token.

const lensView = {};

function lensLines(one) {
  if (!one.lens) return [];
  return one.lens.sites.map((name, lead) => ({
    name,
    top: one.likeliest("lens", lead, state.row, state.token),
    divergence: one.at("lens.divergences", lead, state.row, state.token),
    next: one.at("lens.log_probabilities", lead, state.row, state.token),
  }));
}

addView({
  id: "lens", title: "Predictions by depth",
  here: () => page.passes.some((one) => one.lens),
  needs: (one) => (one.lens ? ["top_tokens", "top_probabilities", "log_probabilities", "divergences"].map((name) => `lens.${name}`) : []),
  build(body) {
    lensView.table = h("div", { class: "scroll" });
    lensView.legend = h("div");
    lensView.caption = this.caption;
    body.append(lensView.table, lensView.legend);
  },
  paint() {
    const one = pass();
    const lines = lensLines(one);
    if (!lines.length) {
      this.caption.textContent = `No predictions by depth were measured for ${one.name}.`;
      lensView.table.replaceChildren();
      return;
    }
    const count = lines[0].top.length;
    const next = state.token + 1 < one.length ? one.text(state.row, state.token + 1) : null;
    lensView.caption.replaceChildren(
      "The likeliest next tokens after ", tokenElement(one.text(state.row, state.token), 24), ` (token ${state.token}) if the model ended at a site. The last row is what it predicts.`,
      ...(next === null ? [] : [" What comes next is ", tokenElement(next, 24), "."]));
    const cell = ({ text, probability }) => h("td", { class: "guess", style: { "background-color": colourOf(probability, [0, 1]), color: inkOn(colourOf(probability, [0, 1])) } },
      tokenElement(text, 14), h("span", { class: "number" }, percent(probability)));
    const chosen = (line) => (line.name === state.site ? "chosen" : null);
    lensView.table.replaceChildren(h("table", { class: "lens" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "site"), Array.from({ length: count }, (_, n) => h("th", { scope: "col" }, `${n + 1}.`)),
        h("th", { scope: "col", class: "number" }, "KL, nats"), h("th", { scope: "col", class: "number" }, "log p of next"))),
      h("tbody", {}, lines.map((line) => h("tr", { class: chosen(line) },
        h("th", { scope: "row" }, h("button", { type: "button", class: "link", onclick: () => set({ site: line.name }) }, headOf(line.name))), line.top.map(cell),
        h("td", { class: "number" }, told(line.divergence)), h("td", { class: "number" }, Number.isNaN(line.next) ? "\u2013" : told(line.next)))))));
    lensView.legend.replaceChildren(legend([0, 1], "probability"));
  },
  rows() {
    const one = pass();
    return [
      ["site", "row", "token", "rank", "prediction", "probability", "kl_nats", "log_probability_of_next"],
      ...lensLines(one).flatMap((line) => line.top.map(({ text, probability }, n) => [line.name, state.row, state.token, n + 1, text, probability, line.divergence, line.next])),
    ];
  },
  picture() {
    const lines = lensLines(pass());
    const groups = [{ name: "", rows: lines.map((line) => ({ name: line.name, cells: line.top.map(({ text, probability }) => ({ text: `${plainToken(text, 12)} ${percent(probability)}`, fill: colourOf(probability, [0, 1]) })) })) }];
    return cellPicture({ title: `Likeliest next tokens after token ${state.token}, by site`, columns: (lines[0]?.top ?? [""]).map((_, n) => `${n + 1}.`), groups, limits: [0, 1], unit: "probability", cell: 130 });
  },
});
