// The page of attention residuals. It shows captured numbers: it averages them over tokens and takes
// differences, and computes nothing else.
//
// The contract of the global AttnRes (for live.js, and whoever scripts the page):
//   AttnRes.show(payload)          renders a payload in place, keeps the state where it still applies; a promise
//   AttnRes.payload                what is shown now
//   AttnRes.state                  {trace, row, token, end, scope, site, source, measure, tint, layout, range, theme}
//   AttnRes.set(changes)           changes the state, such as {site: "L3.mlp", token: 5}
//   AttnRes.on(event, handler)     "select": a cell, token or site was chosen; "show": a payload is shown;
//                                  the handler gets {trace, row, site, source, token}
//   AttnRes.cellActions(describe)  describe(detail) -> [{label, run}], buttons in the panel of the selected cell
//   <section id="live" hidden>     stands at the top, empty, for live controls
//
// Files share one scope and run in the order that document.py names.
//
// data.js: arrays are decoded when they are first needed; means are over real tokens only.

async function decoded(array) {
  const packed = atob(array.data);
  const bytes = new Uint8Array(packed.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = packed.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const places = new Uint8Array(await new Response(stream).arrayBuffer());
  const count = places.length / 4;
  const numbers = new Uint8Array(places.length);
  for (let place = 0; place < 4; place++) {
    for (let i = 0, from = place * count; i < count; i++) numbers[4 * i + place] = places[from + i];
  }
  return array.type === "int32" ? new Int32Array(numbers.buffer) : new Float32Array(numbers.buffer);
}

class Pass {
  // One recorded pass: the document's part, with arrays by name once they are decoded.
  constructor(document) {
    Object.assign(this, document);
    this.rows = this.tokens.ids.length;
    this.length = this.tokens.ids[0].length;
    this.numbers = {};
    this.siteNumbers = new Map(this.sites.map((site, number) => [site.name, number]));
    this.columns = this.sites.map((site) => new Map(site.sources.map((one, n) => [one.identity, n])));
    this.real = this.tokens.real.map((row) => row.flatMap((is, token) => (is ? [token] : [])));
  }

  // Decodes arrays by name; "lens.divergences" is one of the lens.
  async need(names) {
    await Promise.all(names.map(async (name) => {
      const [group, part] = name.includes(".") ? name.split(".") : ["arrays", name];
      const array = this[group]?.[part];
      if (array && !this.numbers[name]) this.numbers[name] = await decoded(array);
    }));
  }

  at(name, lead, row, token) {
    return this.numbers[name][(lead * this.rows + row) * this.length + token];
  }

  // The mean over places [[row, token], ...]; one place gives its number as it is. NaN: not defined.
  mean(name, lead, places) {
    const numbers = this.numbers[name];
    let sum = 0, count = 0;
    for (const flat of places) {
      const number = numbers[lead * this.rows * this.length + flat];
      if (!Number.isNaN(number)) { sum += number; count++; }
    }
    return count ? sum / count : NaN;
  }

  // The places that a scope means, as row * length + token.
  places(state) {
    const start = state.row * this.length;
    if (state.scope === "all") return this.real.flatMap((row, n) => row.map((token) => n * this.length + token));
    if (state.scope === "text") return this.real[state.row].map((token) => start + token);
    if (state.end === null) return [start + state.token];
    const [low, high] = [Math.min(state.token, state.end), Math.max(state.token, state.end)];
    const inside = this.real[state.row].filter((token) => low <= token && token <= high);
    return (inside.length ? inside : [state.token]).map((token) => start + token);
  }

  // The name of the array and its row for a cell of the map; null: the site has no such source.
  cell(measure, site, column) {
    if (measure === "writer") {
      const row = this.writer_rows[site][this.writers.indexOf(column)];
      return row === undefined || row < 0 ? null : ["weight", row];
    }
    const source = this.columns[site].get(column);
    return source === undefined ? null : [measure, this.sites[site].first + source];
  }

  // undefined: there is no such source; NaN: the number is not defined there.
  value(measure, site, column, places) {
    if (measure === "effect") return effectOf(this.sites[site].name, column);
    const cell = this.cell(measure, site, column);
    return cell ? this.mean(...cell, places) : undefined;
  }

  isOpen(site, column) {
    const source = this.columns[site].get(column);
    return source !== undefined && this.sites[site].sources[source].open;
  }

  text(row, token) {
    return this.tokens.texts ? this.tokens.texts[row][token] : String(this.tokens.ids[row][token]);
  }

  // The likeliest next tokens at a place: [{text, probability}], from "predictions" or a site of the lens; none
  // after padding.
  likeliest(group, lead, row, token) {
    const tokens = this.numbers[`${group}.top_tokens`];
    const shape = this[group].top_tokens.shape;
    const count = shape[shape.length - 1];
    const start = ((lead * this.rows + row) * this.length + token) * count;
    return Array.from({ length: count }, (_, n) => {
      const id = tokens[start + n];
      return {
        text: page.payload.vocabulary[id] ?? `#${id}`,
        probability: this.numbers[`${group}.top_probabilities`][start + n],
      };
    }).filter(({ probability }) => !Number.isNaN(probability));
  }
}

const page = { payload: null, passes: [], effects: new Map(), limits: {}, pair: null };

function effectOf(site, column) {
  return page.effects.get(`${site}\n${column}`);
}

// Takes a new document, and decodes what the first picture needs.
async function take(payload) {
  const passes = payload.traces.map((trace) => new Pass(trace));
  await Promise.all(passes.map((pass) => pass.need(["weight"])));
  const pair = payload.pair && { ...payload.pair };
  for (const name of ["divergence", "control", "prediction"]) {
    if (pair?.[name]) pair[name] = await decoded(pair[name]);
  }
  Object.assign(page, { payload, passes, pair });
  page.effects = new Map(payload.effects
    .filter((one) => one.site !== null && one.divergence !== null)
    .map((one) => [`${one.site}\n${one.source}`, one.divergence]));
  page.limits = limitsOf(passes);
}

// What each map measure needs decoded.
function arraysOf(measure) {
  return { writer: ["weight"], effect: [] }[measure] ?? [measure];
}

// Fixed limits of the colours, the same for all passes: [low, high, fitted high].
function limitsOf(passes) {
  const span = (count) => passes.reduce(([low, high], pass) => {
    const numbers = pass.numbers.weight;
    const end = count(pass) * pass.rows * pass.length;
    for (let i = 0; i < end; i++) {
      if (numbers[i] < low) low = numbers[i];
      if (numbers[i] > high) high = numbers[i];
    }
    return [low, high];
  }, [0, 1]);
  const rounded = ([low, high]) => (low < 0 ? [-Math.max(-low, high), Math.max(-low, high)] : [0, high <= 1.01 ? 1 : high]);
  const effects = [...page.effects.values()];
  return {
    weight: rounded(span((pass) => pass.num_source_rows)),
    writer: rounded(span((pass) => pass.arrays.weight.shape[0])),
    norm_share: [0, 1],
    projection_share: [-1, 1],
    effect: [0, Math.max(1e-12, ...effects)],
  };
}
