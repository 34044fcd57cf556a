"use strict";
// Every text enters the page as the content of a text node or as an attribute: captions and names are never parsed as HTML.
const stored = JSON.parse(document.getElementById("answers").textContent);
const byId = (id) => document.getElementById(id);
const state = { collection: 0, caption: "", row: null, runs: [], collections: [], turn: 0 };
const SVG = "http://www.w3.org/2000/svg";
const PALETTE = ["#5c6bc0", "#d81b60", "#e08a00", "#00897b", "#8e5bd0", "#1e88e5", "#7a8b00", "#c0504d", "#00838f", "#b07d48", "#607d8b", "#3f9142"];

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const element = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
const drawn = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);
const legendItem = (colour, text) => element("li", {}, element("span", { style: `background: ${colour}` }), text);

async function ask(path) {
  if (stored) {
    if (!(path in stored.answers)) throw new Error("This page was exported without an answer to this question: run clipzoo explore without --static.");
    return stored.answers[path];
  }
  let response;
  try {
    response = await fetch("api/" + path);
  } catch (error) {
    throw new Error("The server has stopped: run clipzoo explore again.");
  }
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

const has = (path) => !stored || path in stored.answers;
const pictureAddress = (row) => stored ? stored.pictures[state.collection + "/" + row] || "" : `picture?collection=${state.collection}&row=${row}`;
const pathOf = {
  search: (caption) => `search?collection=${state.collection}&caption=${encodeURIComponent(caption)}`,
  picture: (row) => `picture?collection=${state.collection}&row=${row}`,
  parts: (row, caption) => `parts?collection=${state.collection}&row=${row}&caption=${encodeURIComponent(caption)}`,
  maps: () => `maps?collection=${state.collection}`,
};

function pictures(matches, describe) {
  const items = matches.map((match) => {
    const words = describe(match);
    const image = element("img", { src: pictureAddress(match.row), alt: `picture ${match.row}`, loading: "lazy" });
    const button = element("button", { type: "button", "data-row": match.row, title: `picture ${match.row}: ${words}` }, image, words);
    button.addEventListener("click", () => guarded(() => choose(match.row)));
    return element("li", {}, button);
  });
  return element("ol", { class: "pictures" }, ...items);
}

const scored = (match) => match.score.toFixed(2);

async function search(caption) {
  state.caption = caption;
  const turn = ++state.turn;
  const answers = await ask(pathOf.search(caption));
  if (turn !== state.turn) return;
  state.answers = answers;
  byId("results").replaceChildren(...answers.map((answer) => {
    const card = element("div", { class: "card" }, element("h3", {}, answer.model), pictures(answer.matches, scored));
    if (answer.memory) {
      const text = `Retrieved from the memory of all pictures (as in training, where the batch is the memory): weights of the strongest, spread over about ${answer.memory.patterns} pictures.`;
      card.append(element("p", { class: "note" }, text), pictures(answer.memory.retrieved, (match) => (100 * match.weight).toFixed(1) + " %"));
    }
    return card;
  }));
  mark();
  if (state.row !== null) await explain();
}

async function choose(row) {
  state.row = row;
  mark();
  const answer = await ask(pathOf.picture(row));
  if (state.row !== row) return;
  const facts = element("div", {}, element("h3", {}, `Picture ${answer.name}`));
  if (answer.class !== null) facts.append(element("p", {}, `class: ${answer.class}`));
  if (answer.captions.length) facts.append(element("p", {}, "Captions:"), element("ul", {}, ...answer.captions.map((text) => element("li", {}, text))));
  const image = element("img", { src: pictureAddress(row), alt: [answer.class, ...answer.captions].filter(Boolean).join("; ") || `picture ${answer.name}` });
  const neighbours = answer.neighbours.map((part) => element("div", { class: "card" }, element("h3", {}, `${part.model}: neighbours`), pictures(part.matches, scored)));
  byId("picture").hidden = false;
  byId("picture").replaceChildren(
    element("h2", {}, "Picture"), element("div", { class: "about" }, image, facts),
    element("div", { class: "models" }, ...neighbours), element("div", { id: "parts" }),
  );
  await explain();
  byId("picture").scrollIntoView({ block: "nearest" });
}

async function explain() {
  const place = byId("parts"), row = state.row, caption = state.caption;
  if (!place || !caption) return;
  if (!has(pathOf.parts(row, caption))) {
    place.replaceChildren(element("p", { class: "note" }, "This export has no patches and words for this picture with this caption."));
    return;
  }
  const answers = await ask(pathOf.parts(row, caption));
  if (row !== state.row || caption !== state.caption) return;
  place.replaceChildren();
  if (!answers.length) {
    place.append(element("p", { class: "note" }, "These models compare one vector per picture and caption: no patch or word has a part of its own in the score."));
    return;
  }
  place.append(
    element("h3", {}, `Patches and words that carry the score with “${caption}”`),
    element("p", { class: "note" }, "Blue parts raise the score, red parts lower it. Press a word to see its patches, or a patch to see its words."),
    element("div", { class: "models" }, ...answers.map((answer) => partsCard(answer, row))),
  );
}

function shade(value, largest) {
  const share = Math.round(80 * Math.min(1, Math.abs(value) / (largest || 1)));
  return `color-mix(in srgb, ${value >= 0 ? "#3f6bff" : "#e53935"} ${share}%, transparent)`;
}

function partsCard(answer, row) {
  const chosen = { patch: null, word: null };
  const sum = (numbers) => numbers.reduce((total, value) => total + value, 0);
  const patchNames = answer.values.map((_, index) => patchName(answer, index));
  const cells = answer.values.map((_, index) => element("button", { type: "button", "aria-pressed": "false" }));
  const words = answer.words.map((word) => element("button", { type: "button", "aria-pressed": "false" }, word));
  const text = answer.is_logarithm ? `score ${answer.score.toFixed(2)}, the logarithm of the sum of all parts` : `score ${answer.score.toFixed(2)}, the sum of all parts`;
  function paint() {
    const ofPatch = answer.values.map((line) => chosen.word === null ? sum(line) : line[chosen.word]);
    const ofWord = answer.words.map((_, word) => chosen.patch === null ? sum(answer.values.map((line) => line[word])) : answer.values[chosen.patch][word]);
    const largest = [Math.max(...ofPatch.map(Math.abs)), Math.max(...ofWord.map(Math.abs))];
    const describe = (value, weight) => `part ${value.toPrecision(3)}, weight ${weight.toPrecision(3)}`;
    cells.forEach((cell, index) => {
      cell.style.background = shade(ofPatch[index], largest[0]);
      cell.title = `${patchNames[index]}: ${describe(ofPatch[index], answer.image_weights[index])}`;
      cell.setAttribute("aria-label", cell.title);
      cell.setAttribute("aria-pressed", String(chosen.patch === index));
    });
    words.forEach((word, index) => {
      word.style.background = shade(ofWord[index], largest[1]);
      word.title = describe(ofWord[index], answer.text_weights[index]);
      word.setAttribute("aria-pressed", String(chosen.word === index));
    });
  }
  cells.forEach((cell, index) => cell.addEventListener("click", () => { chosen.patch = chosen.patch === index ? null : index; paint(); }));
  words.forEach((word, index) => word.addEventListener("click", () => { chosen.word = chosen.word === index ? null : index; paint(); }));
  paint();
  const card = element("div", { class: "card parts" }, element("h3", {}, answer.model), element("p", { class: "note" }, text));
  if (answer.side) {
    const image = element("img", { src: pictureAddress(row), alt: `the picture with its ${answer.side} x ${answer.side} patches`, style: `object-fit: ${answer.fit}` });
    const grid = element("div", { style: `grid-template-columns: repeat(${answer.side}, 1fr)` }, ...cells.slice(answer.prefix));
    card.append(element("div", { class: "patches" }, image, grid));
  }
  const first = answer.side ? cells.slice(0, answer.prefix) : cells;
  first.forEach((cell, index) => cell.append(patchNames[index]));
  if (first.length) card.append(element("div", { class: "words" }, ...first));
  card.append(element("div", { class: "words" }, ...words), strongest(answer, patchNames));
  return card;
}

function patchName(answer, index) {
  if (index < answer.prefix) return `token ${index + 1}, of the whole picture`;
  if (!answer.side) return `token ${index + 1}`;
  const patch = index - answer.prefix;
  return `row ${Math.floor(patch / answer.side) + 1}, column ${patch % answer.side + 1}`;
}

function strongest(answer, patchNames) {
  const pairs = answer.values.flatMap((line, patch) => line.map((value, word) => ({ value, patch, word })));
  pairs.sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
  const rows = pairs.slice(0, 5).map(({ value, patch, word }) => element("tr", {},
    element("td", { class: "left" }, patchNames[patch]), element("td", { class: "left" }, answer.words[word]), element("td", {}, value.toPrecision(3))));
  const head = element("tr", {}, element("th", { class: "left" }, "patch"), element("th", { class: "left" }, "word"), element("th", {}, "part"));
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
}

function mark() {
  for (const button of document.querySelectorAll("button[data-row]")) button.setAttribute("aria-current", String(Number(button.dataset.row) === state.row));
  for (const map of document.querySelectorAll("svg.map")) {
    map.querySelectorAll(".ring").forEach((ring) => ring.remove());
    const found = (state.answers || []).find((answer) => answer.model === map.dataset.model);
    const rows = [...(found ? found.matches.map((match) => match.row) : []), ...(state.row === null ? [] : [state.row])];
    for (const row of rows) {
      const point = map.querySelector(`circle[data-row="${row}"]`);
      if (point) map.append(drawn("circle", { class: "ring", cx: point.getAttribute("cx"), cy: point.getAttribute("cy"), r: row === state.row ? 9 : 6 }));
    }
  }
}

const colourOf = (label, count) => count <= PALETTE.length ? PALETTE[label % PALETTE.length] : `hsl(${Math.round(360 * label / count)} 62% 52%)`;

async function showMaps() {
  const answer = await ask(pathOf.maps()), names = state.collections[state.collection].classes;
  const cards = answer.models.map((model) => {
    const map = drawn("svg", { class: "map", viewBox: "-110 -110 220 220", role: "img", "data-model": model.model,
      "aria-label": `Embedding map of ${model.model}: ${answer.rows.length} pictures${names.length ? `, coloured by ${names.length} classes` : ""}` });
    model.points.forEach(([x, y], index) => {
      const row = answer.rows[index], label = answer.labels[index];
      const point = drawn("circle", { class: "point", cx: 100 * x, cy: -100 * y, r: 2.4, "fill-opacity": .8, "data-row": row,
        fill: label === undefined ? PALETTE[0] : colourOf(label, names.length) });
      point.append(drawn("title", {}, `picture ${row}${label === undefined ? "" : ", " + names[label]}`));
      if (has(pathOf.picture(row))) point.addEventListener("click", () => guarded(() => choose(row)));
      map.append(point);
    });
    const share = model.variance.map((part) => (100 * part).toFixed(0) + " %").join(" and ");
    return element("div", { class: "card" }, element("h3", {}, model.model), map, element("p", { class: "note" }, `${share} of the variance`));
  });
  const legend = names.slice(0, 40).map((name, label) => legendItem(colourOf(label, names.length), name));
  if (names.length > 40) legend.push(element("li", {}, `and ${names.length - 40} more`));
  const about = names.length ? element("ul", { class: "legend" }, ...legend)
    : element("p", { class: "note" }, "These pictures have no classes: choose a dataset with classes above to see colours.");
  byId("maps").replaceChildren(...cards);
  byId("classes").replaceChildren(about);
  mark();
}

const tick = (value) => Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(1) : String(Number(value.toPrecision(3)));

function chart(title, unit, lines) {
  const steps = lines.flatMap((line) => line.steps), values = lines.flatMap((line) => line.values);
  const [low, high, last] = [Math.min(...values), Math.max(...values), Math.max(...steps, 1)];
  const x = (step) => 58 + 232 * step / last, y = (value) => 128 - 100 * (high > low ? (value - low) / (high - low) : .5);
  const heading = unit ? `${title} (${unit})` : title;
  const newest = lines.map((line) => `${line.run} ${tick(line.values[line.values.length - 1])}`).join(", ");
  const svg = drawn("svg", { viewBox: "0 0 300 156", role: "img", "aria-label": `${heading} by step; last values: ${newest}` });
  for (const value of high > low ? [low, (low + high) / 2, high] : [low]) {
    svg.append(drawn("line", { x1: 58, x2: 290, y1: y(value), y2: y(value), stroke: "var(--line)" }));
    svg.append(drawn("text", { x: 54, y: y(value) + 4, "text-anchor": "end" }, tick(value)));
  }
  for (const line of lines) {
    const points = line.steps.map((step, index) => `${x(step).toFixed(1)},${y(line.values[index]).toFixed(1)}`).join(" ");
    svg.append(drawn("polyline", { points, fill: "none", stroke: line.colour, "stroke-width": 1.6 }));
    if (line.steps.length === 1) svg.append(drawn("circle", { cx: x(line.steps[0]), cy: y(line.values[0]), r: 3, fill: line.colour }));
  }
  svg.append(drawn("text", { x: 58, y: 148 }, "0"), drawn("text", { x: 290, y: 148, "text-anchor": "end" }, `step ${last}`));
  return element("div", { class: "card" }, element("h3", {}, heading), svg);
}

async function showCurves() {
  const runs = await ask("curves");
  const titles = new Map();
  runs.forEach((run, number) => run.curves.forEach((curve) => {
    if (!curve.values.length) return;
    const lines = titles.get(curve.title) || { unit: curve.unit, main: curve.main, lines: [] };
    lines.lines.push({ run: run.name, colour: PALETTE[number % PALETTE.length], steps: curve.steps, values: curve.values });
    titles.set(curve.title, lines);
  }));
  const legend = element("ul", { class: "legend" }, ...runs.map((run, number) => legendItem(PALETTE[number % PALETTE.length], `${run.name}: ${run.state}`)));
  const charts = (main) => [...titles].filter(([, curve]) => curve.main === main).map(([title, { unit, lines }]) => chart(title, unit, lines));
  const more = element("details", {}, element("summary", {}, "More curves"), element("div", { class: "charts" }, ...charts(false)));
  more.open = Boolean(document.querySelector("#curves details[open]"));
  const shown = titles.size ? [element("div", { class: "charts" }, ...charts(true)), more] : [element("p", { class: "note" }, "These models have no training log.")];
  byId("curves").replaceChildren(legend, ...shown);
  if (!stored && runs.some((run) => run.is_training)) setTimeout(() => guarded(showCurves), 5000);
}

async function chooseCollection(number) {
  byId("message").textContent = "Embedding the pictures, where this is the first time ...";
  Object.assign(state, { collection: number, row: null, caption: "", answers: [] });
  const collection = state.collections[number];
  byId("picture").hidden = true;
  byId("results").replaceChildren();
  const options = collection.choices.map((text) => stored ? element("option", { value: text }, text) : element("option", { value: text }));
  byId(stored ? "caption" : "choices").replaceChildren(...options);
  if (!stored) byId("caption").value = collection.choices[0] || "";
  const part = collection.count < collection.total ? `${collection.count} of its ${collection.total} pictures` : `${collection.count} pictures`;
  byId("facts").textContent = `${collection.name}: ${part}, by ${state.runs.join(", ")}.${stored ? "" : " All computation is on this machine."}`;
  if (byId("caption").value) await search(byId("caption").value);
  await showMaps();
}

async function guarded(work) {
  try {
    byId("message").textContent = "";
    await work();
    byId("message").textContent = "";
  } catch (error) {
    byId("message").textContent = error.message;
  }
}

byId("search").addEventListener("submit", (event) => {
  event.preventDefault();
  guarded(() => search(byId("caption").value));
});
byId("collection").addEventListener("change", () => guarded(() => chooseCollection(byId("collection").selectedIndex)));
if (stored) byId("caption").addEventListener("change", () => guarded(() => search(byId("caption").value)));

guarded(async () => {
  const overview = await ask("overview");
  Object.assign(state, overview);
  byId("collection").replaceChildren(...state.collections.map((collection) => element("option", {}, collection.name)));
  await chooseCollection(0);
  await showCurves();
});
