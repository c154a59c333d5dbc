// words.js: what each number is, in two sentences, and what it is not.

const MEASURES = {
  weight: {
    title: "Weight", unit: "share",
    is: "How much of each source a site mixes into what it reads. Under a softmax the weights of a site are 0 or more and sum to 1 at every token.",
    trap: "A weight is not a cause: a heavily weighted source may be short, cancelled by another, or ignored by what reads the mix.",
  },
  norm_share: {
    title: "Norm share", unit: "share",
    is: "The length of each contribution, weight times source, as a share of the lengths of all. Long sources count for more than their weight says.",
    trap: "A length has no direction: two long contributions may point apart and cancel; see the coherence.",
  },
  projection_share: {
    title: "Projection share", unit: "share of the state",
    is: "The part of each contribution that lies along the state that is read, over the state's length. The shares of a site sum to 1.",
    trap: "It may be below 0 (the source pulls against the state) or above 1 (others take back), and means little where the state is short.",
  },
  effect: {
    title: "Causal effect", unit: "nats",
    is: "How far the model's predictions move when the site cannot read the source: the mean divergence (KL) between predictions before and after. It is measured by running the model again with that one edge dropped.",
    trap: "It is one kind of edit on one set of texts, averaged over their tokens: what another source can stand in for shows no effect though both are used.",
  },
  writer: {
    title: "Writer weights", unit: "times",
    is: "How many times what a site reads holds the output of each single sublayer, through whatever source holds it. This one number compares across residual rules: 1 everywhere is the standard residual.",
    trap: "All writers of a block share the block's weight: the model did not choose among them.",
  },
};

const STATISTICS = {
  state_norm: {
    title: "State norm", unit: "L2 norm", fixed: null,
    is: "The length of the mix that a site reads. The reader normalises it away, so it matters through its growth over depth.",
    trap: "It depends on how many sources are averaged: compare sites of one kind.",
  },
  entropy: {
    title: "Entropy", unit: "0 to 1", fixed: [0, 1],
    is: "How spread a site's weights are: 0 reads one source only, 1 reads all alike. It is divided by the logarithm of the number of sources, so that sites compare.",
    trap: "A mean of entropies is not the entropy of the mean: sharp reads of different sources look spread only on average.",
  },
  distance: {
    title: "Effective distance", unit: "sublayers", fixed: null,
    is: "How many sublayers back a site looks, as the mean over its weights. 1 is what was written last; the largest possible is the embedding.",
    trap: "A block counts as if it were where the mean of its writers is: half near and half far looks like the middle.",
  },
  coherence: {
    title: "Coherence", unit: "0 to 1", fixed: [0, 1],
    is: "The length of the state over the sum of the lengths of its contributions. 1: all point the same way; 0: they cancel.",
    trap: "Low coherence makes norm shares misleading: large parts may be thrown away.",
  },
  embedding_share: {
    title: "Weight on the embedding", unit: "share", fixed: [0, 1],
    is: "The share of a site's weight that is on the token's own embedding. It tells how long the word itself stays in use.",
    trap: "The embedding's score is a function of the token alone, so a pattern over tokens here may be a list of words.",
  },
  writer_norm: {
    title: "What each sublayer writes", unit: "L2 norm", fixed: null,
    is: "The length of the output of the embedding, of each attention and of each MLP. It is what readers weigh.",
    trap: "Keys are normalised before they are scored, so a longer output gets no higher weight; it does get a larger contribution.",
  },
};

const TINTS = {
  cell: {
    title: (state) => `${MEASURES[state.measure].title} of ${state.source} at ${state.site}`,
    is: "The number of the selected cell of the map, at each token. Select another cell to see another number.",
    trap: "Attention mixes tokens: what is read at a token is not only about that token.",
  },
  surprise: {
    title: () => "Surprise",
    is: "Minus the log-probability that the model gave to the token before it came, in nats. 0 is certain.",
    trap: "Surprising places often have unusual routing for the plain reason that they are unusual.",
  },
  prediction: {
    title: () => `Change of the prediction${page.passes[1] ? `, ${page.passes[0].name} to ${page.passes[1].name}` : ""}`,
    is: "The divergence (KL) from the first pass's prediction to the second's at each token, in nats. 0 is the same prediction.",
    trap: "Before the first difference between the passes it must be 0; a number there is rounding.",
  },
};

const HOW_TO_READ = [
  "A row is a site: a place before an attention or an MLP (or the output) where the model mixes what was written before. A column is a source, under the same name wherever it is read; a block has one column, open or finished.",
  "Hatched: the source does not exist yet. A dashed frame: the block is still open when it is read. A dash: the number is not defined, such as a share where there is only one source.",
  "Averages are over real tokens: padding and special tokens, such as the end of a text, are left out.",
];
