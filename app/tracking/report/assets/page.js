"use strict";
// Shows the charts and samples of the JSON in the page.
const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs, SEVERAL = RUNS.length > 1;
const PALETTE = 6;
const color = (index) => `var(--s${index % PALETTE})`;
// More runs than palette colors: hues evenly around the circle, in two lightnesses, so that no two runs share a color.
const runColor = (r) => (RUNS.length <= PALETTE ? color(r) : `hsl(${((360 * r) / RUNS.length).toFixed(1)} 65% ${r % 2 ? 62 : 42}%)`);
const HEIGHT = 190;
const SMOOTH_FROM = 50; // points: longer curves get a smoothed line over the faint raw one

const FORMS = {
  percent: (v, digits = 3) => +(100 * v).toPrecision(digits) + "%",
  seconds: (v) => (v === 0 ? "0" : v < 0.1 ? +(1000 * v).toPrecision(2) + " ms" : +v.toPrecision(3) + " s"),
  bytes: (v) => scaled(v, 1024, ["B", "KiB", "MiB", "GiB", "TiB"], " "),
  count: (v) => scaled(v, 1000, ["", "k", "M", "G", "T"], ""),
  number: (v, digits = 3) => {
    const size = Math.abs(v);
    if (v === 0) return "0";
    if (size < 1e-3 || size >= 1e6) return v.toExponential(1).replace(".0e", "e").replace("e+", "e");
    return String(+v.toPrecision(digits));
  },
};
function scaled(v, base, units, gap) {
  let at = 0;
  while (Math.abs(v) >= base && at < units.length - 1) { v /= base; at++; }
  return +v.toPrecision(3) + gap + units[at];
}
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
// A canvas has no CSS variables: resolve the theme's color when drawing.
const brush = document.getElementById("theme").appendChild(make("span", { hidden: "" }));
function paint(value) {
  brush.style.color = value;
  return getComputedStyle(brush).color;
}

// ---- charts: drawn by uPlot when they become visible, with one cursor for all
const figures = [];
// One run: a color for each metric. Several runs: a chart for each metric (`split`) and a color for each run.
function split(chart) {
  if (!SEVERAL || chart.kind === "stack" || chart.metrics.length === 1) return [chart];
  return chart.metrics.filter((metric) => RUNS.some((run) => run.series[metric])).map((metric) => {
    const label = chart.labels[chart.metrics.indexOf(metric)];
    return { ...chart, title: `${chart.title}: ${label}`, metrics: [metric], labels: [label] };
  });
}
function lines(chart) {
  return RUNS.flatMap((run, r) => chart.metrics.map((metric, m) => ({
    label: SEVERAL ? run.name : chart.labels[m], x: run.steps, y: run.series[metric] || [], color: SEVERAL ? runColor(r) : color(m),
  }))).filter((line) => line.y.some((v) => v !== null));
}
// Bars from 0 to the sum of a phase and those below it, the highest drawn first.
function stack(chart, run) {
  const x = run.steps.filter((_, i) => chart.metrics.some((metric) => run.series[metric]?.[i] != null));
  const below = x.map(() => 0);
  return chart.metrics.filter((metric) => run.series[metric]).map((metric) => {
    const label = chart.labels[chart.metrics.indexOf(metric)];
    const y = x.map((step) => run.series[metric][run.steps.indexOf(step)] || 0);
    y.forEach((v, i) => { below[i] += v; });
    return { label, x, y: [...below], shown: y, color: color(chart.metrics.indexOf(metric)) };
  }).reverse();
}
// Centered moving average, which does not lag behind the curve.
function smooth(values) {
  const reach = Math.max(2, Math.round(values.length / 40));
  return values.map((v, i) => {
    if (v == null) return v;
    const side = Math.min(reach, i, values.length - 1 - i), near = values.slice(i - side, i + side + 1).filter((n) => n != null);
    return near.reduce((a, b) => a + b, 0) / near.length;
  });
}
// The options of a series. The legend shows the last value measured until the cursor's step, or the end.
function seriesOf(line, y, chart) {
  const shown = line.shown || y, bars = chart.kind === "stack";
  const value = (_, __, ___, at) => {
    const last = shown.slice(0, at === null ? undefined : at + 1).findLast((v) => v != null);
    return last === undefined ? "–" : FORMS[chart.form](last);
  };
  const points = { show: !bars && y.filter((v) => v != null).length <= 25, size: 6, fill: () => paint(line.color) };
  const paths = bars && y.length <= 100 ? uPlot.paths.bars({ size: [1, Infinity], gap: 1 }) : undefined; // else an area
  const drawn = bars ? { fill: () => paint(line.color), width: 0, paths } : { width: 2 };
  return { label: line.label, stroke: () => paint(line.color), spanGaps: true, value, points, ...drawn };
}
function yRange(chart, low, high) {
  if (low === 0 && high === 0) return [0, 1];
  if (chart.kind === "stack" || (low >= 0 && (low < 0.6 * high || low === high))) low = 0;
  if (chart.form === "percent" && high > 0.5) return [Math.floor(10 * low) / 10, Math.max(1, high)];
  return uPlot.rangeNum(low, high, { min: { pad: low === 0 ? 0 : 0.1, mode: 0 }, max: { pad: 0.1, mode: 0 } });
}
function plot(node, chart, drawn) {
  const joined = uPlot.join(drawn.map((line) => [line.x, line.y])), data = [joined[0]], series = [{ label: "step", value: (u, step) => step ?? u.data[0].at(-1) }];
  const log = chart.log && joined.slice(1).flat().every((v) => v == null || v > 0);
  drawn.forEach((line, i) => {
    const y = joined[i + 1], measured = y.filter((v) => v != null).length;
    const noisy = chart.kind === "line" && !log && measured >= SMOOTH_FROM && measured > 0.7 * y.length;
    if (noisy) { data.push(y); series.push({ ...seriesOf(line, y, chart), width: 1, alpha: 0.3, class: "raw" }); }
    data.push(noisy ? smooth(y) : y);
    series.push(seriesOf(line, y, chart));
  });
  const edge = chart.kind === "stack" ? 0.5 * (data[0][1] - data[0][0] || 1) : data[0].length === 1 ? 1 : 0;
  const axis = { stroke: () => paint("var(--soft)"), font: "11px system-ui, sans-serif", ticks: { show: false }, grid: { stroke: () => paint("var(--grid)"), width: 1 } };
  const colors = [null, ...series.slice(1).map((s) => drawn.find((line) => line.label === s.label).color)];
  return new uPlot({
    width: node.clientWidth, height: HEIGHT, padding: [8, 16, 0, 0],
    cursor: { sync: { key: "steps" }, y: false },
    legend: { markers: { width: 0, fill: (_, i) => colors[i] } },
    scales: {
      x: { time: false, range: (_, low, high) => [low - edge, high + edge] },
      y: log ? { distr: 3 } : { range: (_, low, high) => yRange(chart, low, high) },
    },
    axes: [
      { ...axis, grid: { show: false }, size: 26, values: (_, ticks) => ticks.map(String), incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 1e5] },
      { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : FORMS[chart.form](tick, 5))) },
    ],
    series,
  }, data, node);
}
function addFigure(grid, chart, drawn, title) {
  const node = make("div", { class: "plot" });
  const caption = make("figcaption", {}, make("span", { class: "title" }, title));
  grid.append(make("figure", {}, caption, node));
  const figure = { title, chart, drawn, node, plot: null };
  figures.push(figure);
  new ResizeObserver(() => requestAnimationFrame(() => {
    if (!node.clientWidth) return;
    if (figure.plot) figure.plot.setSize({ width: node.clientWidth, height: HEIGHT });
    else figure.plot = plot(node, chart, drawn);
  })).observe(node);
}
function drop(section) {
  section.remove();
  document.querySelector(`nav a[href="#${section.id}"]`)?.remove();
}
function redraw() { figures.forEach((figure) => figure.plot?.redraw()); }
document.querySelectorAll("[data-charts]").forEach((section) => {
  const grid = section.querySelector(".grid"), own = DATA.charts.filter((c) => c.section === section.dataset.charts).flatMap(split);
  own.forEach((chart) => {
    if (chart.kind !== "stack") return addFigure(grid, chart, lines(chart), chart.title);
    RUNS.filter((run) => chart.metrics.some((m) => run.series[m])).forEach((run) =>
      addFigure(grid, chart, stack(chart, run), SEVERAL ? `${chart.title} · ${run.name}` : chart.title));
  });
  if (own.length) return;
  if (section.querySelector("table")) grid.remove();
  else drop(section);
});

document.querySelectorAll("[data-run]").forEach((key) => { key.style.background = runColor(+key.dataset.run); });

// ---- samples
const pick = Object.fromEntries(["run", "step", "filter", "where", "cards"].map((id) => [id, document.getElementById("sample-" + id)]));
RUNS.forEach((run, r) => pick.run.append(make("option", { value: r }, run.name)));
pick.run.hidden = !SEVERAL;
function sampleCard(row) {
  const level = row.reward > 0.5 ? "high" : row.reward > 0 ? "mid" : "low";
  const reward = make("span", { class: `reward ${level}` }, row.reward === null ? "reward failed" : `reward ${FORMS.number(row.reward)}`);
  const top = make("div", { class: "top" }, reward);
  Object.entries(row.components).forEach(([name, value]) => top.append(make("span", { class: "component" }, `${name} ${value === null ? "failed" : FORMS.number(value)}`)));
  Object.entries(row.scores || {}).forEach(([name, value]) => top.append(make("span", { class: "component" }, `${name === "score" ? name : `score ${name}`} ${value === null ? "–" : FORMS.number(value)}`)));
  top.append(make("span", {}, row.turns ? `${row.tokens} sampled tokens, ending: ${row.ending}` : `${row.tokens} tokens, finish reason: ${row.finish}`));
  if (row.sequences > 1) top.append(make("span", {}, `${row.sequences} sequences`));
  if (row.versions.length) top.append(make("span", {}, `policy version ${[...new Set(row.versions)].join(", ")}`));
  if (row.logprob !== null) top.append(make("span", {}, `mean log-prob ${FORMS.number(row.logprob)}`));
  const card = make("article", { class: "sample" }, top);
  const block = (label, text, name) => card.append(make("pre", { class: name }, make("span", { class: "label" }, label), text));
  if (row.turns) conversation(row, block);
  else {
    block(row.prompt || "prompt", row.question ?? "(the prompt's text was not recorded)", "question");
    block("completion", row.completion || "(empty)", "completion");
  }
  if (row.answer !== null) block("reference answer", row.answer, "question");
  return card;
}
// An episode: what the policy sampled, and in another color what it read.
function conversation(row, block) {
  row.turns.forEach((turn, i) => {
    const facts = [turn.role || "left out"];
    if (turn.tokens) facts.push(`${turn.tokens} tokens`);
    if (turn.seconds >= 0.001) facts.push(FORMS.seconds(turn.seconds));
    if (i === 0) facts.unshift(row.prompt);
    block(facts.filter(Boolean).join(" · "), turn.text || "(empty)", turn.role === "assistant" ? "turn sampled" : "turn read");
  });
}
function showSamples() {
  const steps = RUNS[+pick.run.value || 0].samples;
  pick.step.max = Math.max(0, steps.length - 1);
  if (!steps.length) { pick.where.textContent = "none"; return pick.cards.replaceChildren(); }
  const at = steps[Math.min(+pick.step.value, steps.length - 1)];
  pick.where.textContent = `step ${at.step}`;
  const matches = { all: () => true, high: (row) => row.reward > 0, low: (row) => !(row.reward > 0) }[pick.filter.value];
  pick.cards.replaceChildren(...at.rows.filter(matches).map(sampleCard));
}
[pick.run, pick.step, pick.filter].forEach((control) => control.addEventListener("input", showSamples));
pick.step.max = Math.max(0, RUNS[0].samples.length - 1);
pick.step.value = pick.step.max;
showSamples();
if (RUNS.every((run) => !run.samples.length)) drop(document.getElementById("samples"));

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = root.dataset.theme || (dark ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
  redraw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
