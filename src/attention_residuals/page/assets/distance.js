// distance.js: how far apart the weights of each site are in two passes, beside what means nothing.

const distanceView = {};

function sitesDistance(which) {
  const [a] = page.passes;
  const numbers = page.pair[which];
  const places = a.places(state);
  return a.sites.map((_, site) => {
    const found = places.map((flat) => numbers[site * a.rows * a.length + flat]).filter((value) => !Number.isNaN(value));
    return found.length ? found.reduce((sum, value) => sum + value, 0) / found.length : NaN;
  });
}

function distancePicture(width) {
  const [a] = page.passes;
  const [pair, control] = [sitesDistance("divergence"), page.pair.control ? sitesDistance("control") : null];
  const most = niceTop(Math.max(1e-9, ...[...pair, ...(control ?? [])].filter((value) => !Number.isNaN(value))));
  const left = 30 + Math.max(...a.sites.map((site) => widthOf(headOf(site.name), 12)));
  const picture = new Picture(width, 56 + 20 * a.sites.length + 6);
  const x = (value) => left + (width - left - (control ? 180 : 70)) * (value / most);
  picture.text(12, 16, "Divergence of the weights, nats", { size: 13, bold: true });
  picture.text(left, 38, "0", { size: 11, fill: tone("faint"), anchor: "center" });
  picture.text(x(most), 38, told(most), { size: 11, fill: tone("faint"), anchor: "center" });
  a.sites.forEach((site, n) => {
    const y = 58 + 20 * n;
    picture.text(left - 8, y, headOf(site.name), { anchor: "end", bold: site.name === state.site });
    picture.line([[left, y + 10], [x(most), y + 10]], { stroke: tone("line") });
    if (control && !Number.isNaN(control[n])) picture.rect(left, y - 8, Math.max(1, x(control[n]) - left), 16, { hatch: tone("faint"), stroke: tone("faint") });
    if (!Number.isNaN(pair[n])) {
      picture.rect(left, y - 4, Math.max(1, x(pair[n]) - left), 8, { fill: tone("first") });
      picture.text(Math.max(x(pair[n]), control ? x(control[n]) : 0) + 8, y, control ? `${told(pair[n])} (control ${told(control[n])})` : told(pair[n]), { size: 11 });
    }
  });
  return picture;
}

const DISTANCE_NOTE = [
  "How far apart the weights of each site are in the two passes (Jensen-Shannon divergence: 0 is the same, 0.69 nothing in common). It is never below 0, so noise alone is above it.",
  "How far apart the weights of each site are (Jensen-Shannon divergence: 0 is the same, 0.69 nothing in common). Solid, and the first number: ",
];

function distanceNote() {
  const [first, second, control] = pairNames();
  return control === undefined ? DISTANCE_NOTE[0] : `${DISTANCE_NOTE[1]}${first} to ${second}. Hatched, and in brackets: ${first} to ${control}, a difference that means nothing.`;
}

addView({
  id: "distance", title: "How far apart the weights are",
  here: () => page.passes.length > 1 && Boolean(page.pair.divergence),
  needs: () => [],
  build(body) {
    distanceView.bars = h("div", { class: "scroll" });
    distanceView.note = h("p", { class: "quiet" });
    distanceView.table = h("div", { class: "scroll" });
    distanceView.caption = this.caption;
    body.append(distanceView.bars, distanceView.note, h("details", { class: "twin" }, h("summary", {}, "The same as a table"), distanceView.table));
  },
  paint() {
    distanceView.caption.textContent = `Divergence of the weights, ${scopeText(page.passes[0])}.`;
    distanceView.bars.replaceChildren(svgOf(distancePicture(Math.max(300, Math.min(720, seenWidth(distanceView.bars) || 640)))));
    distanceView.note.textContent = distanceNote();
    distanceView.table.replaceChildren(tableOf(this.rows()));
  },
  rows() {
    const [a] = page.passes;
    const [pair, control] = [sitesDistance("divergence"), page.pair.control ? sitesDistance("control") : null];
    const [first, second, third] = pairNames();
    return [["site", `${first} to ${second}, nats`, ...(control ? [`${first} to ${third}, nats`] : [])], ...a.sites.map((site, n) => [site.name, pair[n], ...(control ? [control[n]] : [])])];
  },
  picture: () => distancePicture(720),
});
