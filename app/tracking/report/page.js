"use strict";
// Draws the report's charts and samples from the JSON in the page. No libraries, no network.
const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs, SEVERAL = RUNS.length > 1;
const PHASE_COLORS = { generate: "var(--s0)", train: "var(--s1)", sync: "var(--s2)", other: "var(--rest)" };
const PALETTE = 6;
const color = (index) => `var(--s${index % PALETTE})`;
// More runs than palette colors: hues evenly around the circle, in two lightnesses, so that no two runs share a color.
const runColor = (r) => (RUNS.length <= PALETTE ? color(r) : `hsl(${((360 * r) / RUNS.length).toFixed(1)} 65% ${r % 2 ? 62 : 42}%)`);
const HEIGHT = 190, LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 22;
const SMOOTH_FROM = 50; // points: longer curves get a smoothed line over the faint raw one

const FORMS = {
  percent: (v) => +(100 * v).toPrecision(Math.abs(v) < 0.01 ? 2 : 3) + "%",
  seconds: (v) => (v === 0 ? "0" : v < 0.1 ? +(1000 * v).toPrecision(2) + " ms" : +v.toPrecision(3) + " s"),
  bytes: (v) => scaled(v, 1024, ["B", "KiB", "MiB", "GiB", "TiB"], " "),
  count: (v) => scaled(v, 1000, ["", "k", "M", "G", "T"], ""),
  number: (v) => {
    const size = Math.abs(v);
    if (v === 0) return "0";
    if (size < 1e-3 || size >= 1e6) return v.toExponential(1).replace(".0e", "e").replace("e+", "e");
    return String(+v.toPrecision(3));
  },
};
function scaled(v, base, units, gap) {
  let at = 0;
  while (Math.abs(v) >= base && at < units.length - 1) { v /= base; at++; }
  return +v.toPrecision(3) + gap + units[at];
}
function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "line", "path", "rect", "circle", "text"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// ---- scales
function niceTicks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const ticks = [];
  for (let t = Math.floor(low / step + 1e-9) * step; t <= high + step * 1e-6; t += step) ticks.push(Math.abs(t) < step * 1e-6 ? 0 : +t.toPrecision(12));
  if (ticks[ticks.length - 1] < high - step * 1e-6) ticks.push(+(ticks[ticks.length - 1] + step).toPrecision(12));
  return ticks;
}
function scaleOf(values, chart) {
  let low = Math.min(...values), high = Math.max(...values);
  if (chart.log && low > 0) {
    const from = Math.floor(Math.log10(low)), to = Math.max(Math.ceil(Math.log10(high)), from + 1), every = Math.ceil((to - from) / 4);
    const ticks = [];
    for (let t = from; t <= to; t += every) ticks.push(10 ** t);
    return { ticks, at: (v) => (v > 0 ? (Math.log10(v) - from) / (to - from) : 0) };
  }
  if (chart.kind === "stack" || (low >= 0 && (low < 0.6 * high || low === high))) low = 0;
  if (chart.form === "percent" && high > 0.5) high = Math.max(1, high);
  if (low === high) { high += Math.abs(high) * 0.1 || 1; low -= Math.abs(low) * 0.1; }
  const ticks = niceTicks(low, high, 4);
  const first = ticks[0], last = ticks[ticks.length - 1];
  return { ticks, at: (v) => (v - first) / (last - first) };
}
// Centered moving average, which does not lag behind the curve.
function smooth(values) {
  const reach = Math.max(2, Math.round(values.length / 40));
  return values.map((v, i) => {
    if (v === null) return null;
    const side = Math.min(reach, i, values.length - 1 - i), near = values.slice(i - side, i + side + 1).filter((n) => n !== null);
    return near.reduce((a, b) => a + b, 0) / near.length;
  });
}
function tickLabels(ticks, form) {
  const labels = ticks.map((tick) => FORMS[form](tick));
  return new Set(labels).size === labels.length ? labels : ticks.map((tick) => String(+tick.toPrecision(6)));
}

// ---- charts: a figure redraws at any width and can show the values of one step
const figures = [];
// One run: a color for each metric. Several runs: a chart for each metric (`split`) and a color for each run.
function lineSeries(chart) {
  const series = [];
  RUNS.forEach((run, r) => chart.metrics.forEach((metric, m) => {
    const y = run.series[metric];
    if (!y || y.every((v) => v === null)) return;
    series.push({ label: SEVERAL ? run.name : chart.labels[m], x: run.steps, y, color: SEVERAL ? runColor(r) : color(m) });
  }));
  return series;
}
function split(chart) {
  if (!SEVERAL || chart.kind === "stack" || chart.metrics.length === 1) return [chart];
  return chart.metrics.filter((metric) => RUNS.some((run) => run.series[metric])).map((metric) => {
    const label = chart.labels[chart.metrics.indexOf(metric)];
    return { ...chart, title: `${chart.title}: ${label}`, metrics: [metric], labels: [label] };
  });
}
function stackSeries(chart, run) {
  return chart.metrics.map((metric, m) => ({
    label: chart.labels[m], x: run.steps, y: run.series[metric] || run.steps.map(() => null),
    color: PHASE_COLORS[chart.labels[m]] || color(m),
  }));
}
function addFigure(grid, chart, series, title) {
  const note = make("span", { class: "note" }), legend = make("div", { class: "legend" });
  const caption = make("figcaption", {}, make("span", { class: "title" }, title), note, legend);
  const svg = make("svg", { height: HEIGHT, role: "img", "aria-label": title });
  grid.append(make("figure", {}, caption, svg));
  const values = series.map((s) => {
    const value = make("b");
    const swatch = make("span", { class: "swatch", style: `background:${s.color}` });
    legend.append(make("span", {}, swatch, s.label, value));
    return value;
  });
  const figure = { svg, chart, series, width: 0 };
  figure.show = (step) => {
    note.textContent = step === null ? chart.note : `step ${step}`;
    series.forEach((s, i) => {
      const at = step === null ? lastAt(s.y) : lastBefore(s, step);
      values[i].textContent = at < 0 || s.y[at] === null ? "–" : FORMS[chart.form](s.y[at]);
    });
    if (figure.cross) {
      figure.cross.style.display = step === null ? "none" : "";
      if (step !== null) { const x = figure.xOf(step); figure.cross.setAttribute("x1", x); figure.cross.setAttribute("x2", x); }
    }
  };
  svg.addEventListener("pointermove", (event) => {
    const share = (event.clientX - svg.getBoundingClientRect().left - LEFT) / (figure.width - LEFT - RIGHT);
    const steps = figure.steps, target = steps[0] + Math.min(1, Math.max(0, share)) * (steps[steps.length - 1] - steps[0]);
    showStep(steps.reduce((best, s) => (Math.abs(s - target) < Math.abs(best - target) ? s : best)));
  });
  svg.addEventListener("pointerleave", () => showStep(null));
  figures.push(figure);
  new ResizeObserver(() => draw(figure)).observe(svg);
  return figure;
}
function showStep(step) { figures.forEach((figure) => figure.width && figure.show(step)); }
function lastAt(y) { for (let i = y.length - 1; i >= 0; i--) if (y[i] !== null) return i; return -1; }
// Index of the last measured value at or before the step, or -1.
function lastBefore(s, step) {
  let last = -1;
  for (let i = 0; i < s.x.length && s.x[i] <= step; i++) if (s.y[i] !== null) last = i;
  return last;
}
function draw(figure) {
  const { svg, chart, series } = figure, width = svg.clientWidth;
  if (!width || width === figure.width) return;
  figure.width = width;
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  svg.replaceChildren();
  const stack = chart.kind === "stack";
  const rows = series.length ? series[0].x.map((_, i) => i).filter((i) => series.some((s) => s.y[i] !== null && s.y[i] !== undefined)) : [];
  const steps = figure.steps = stack ? rows.map((i) => series[0].x[i]) : [...new Set(series.flatMap((s) => s.x))].sort((a, b) => a - b);
  const all = stack ? rows.map((i) => series.reduce((sum, s) => sum + (s.y[i] || 0), 0)) : series.flatMap((s) => s.y.filter((v) => v !== null));
  if (!all.length || !steps.length) return;
  const scale = scaleOf(all, chart), first = steps[0], last = steps[steps.length - 1];
  const plot = width - LEFT - RIGHT, bar = stack && steps.length * 3 <= plot ? plot / steps.length : 0;
  const pad = bar / 2;
  const xOf = figure.xOf = (step) => LEFT + pad + (last === first ? 0.5 : (step - first) / (last - first)) * (plot - 2 * pad);
  const yOf = (v) => TOP + (1 - scale.at(v)) * (HEIGHT - TOP - BOTTOM);
  const labels = tickLabels(scale.ticks, chart.form);
  scale.ticks.forEach((tick, i) => {
    const y = yOf(tick);
    svg.append(make("line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
    svg.append(make("text", { x: LEFT - 7, y: y + 4, "text-anchor": "end" }, labels[i]));
  });
  niceTicks(first, last, Math.max(2, plot / 65)).filter((t) => t >= first && t <= last && t % 1 === 0).forEach((tick) => {
    svg.append(make("text", { x: xOf(tick), y: HEIGHT - 5, "text-anchor": "middle" }, String(tick)));
  });
  svg.append(make("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }));
  if (stack) drawStack(svg, series, rows, xOf, yOf, bar);
  else series.forEach((s) => drawLine(svg, s, xOf, yOf, chart));
  figure.cross = make("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, style: "display:none" });
  svg.append(figure.cross);
  figure.show(null);
}
function pathOf(s, y, xOf, yOf) {
  let path = "";
  s.x.forEach((step, i) => { if (y[i] !== null) path += `${path ? "L" : "M"}${xOf(step).toFixed(1)} ${yOf(y[i]).toFixed(1)}`; });
  return path;
}
function drawLine(svg, s, xOf, yOf, chart) {
  const count = s.y.filter((v) => v !== null).length;
  const style = (opacity, width) => `fill:none;stroke:${s.color};stroke-width:${width};opacity:${opacity};stroke-linejoin:round`;
  const smoothed = count >= SMOOTH_FROM && count > 0.7 * s.y.length && !chart.log;
  svg.append(make("path", { d: pathOf(s, s.y, xOf, yOf), style: style(smoothed ? 0.28 : 1, smoothed ? 1 : 2) }));
  if (smoothed) svg.append(make("path", { d: pathOf(s, smooth(s.y), xOf, yOf), style: style(1, 2) }));
  if (count <= 25) s.x.forEach((step, i) => {
    if (s.y[i] !== null) svg.append(make("circle", { cx: xOf(step), cy: yOf(s.y[i]), r: 3, style: `fill:${s.color};stroke:var(--card);stroke-width:1.5` }));
  });
}
function drawStack(svg, series, rows, xOf, yOf, bar) {
  const base = rows.map(() => 0);
  series.forEach((s) => {
    const top = rows.map((i, k) => base[k] + (s.y[i] || 0));
    if (bar) rows.forEach((i, k) => {
      const gap = bar > 5 ? 1 : 0, height = yOf(base[k]) - yOf(top[k]);
      if (height > 0) svg.append(make("rect", { x: xOf(s.x[i]) - bar / 2 + gap / 2, width: bar - gap, y: yOf(top[k]), height, style: `fill:${s.color}` }));
    });
    else {
      const up = rows.map((i, k) => `${xOf(s.x[i]).toFixed(1)} ${yOf(top[k]).toFixed(1)}`);
      const down = rows.map((i, k) => `${xOf(s.x[i]).toFixed(1)} ${yOf(base[k]).toFixed(1)}`).reverse();
      svg.append(make("path", { d: `M${up.join("L")}L${down.join("L")}Z`, style: `fill:${s.color}` }));
    }
    top.forEach((v, k) => { base[k] = v; });
  });
}
document.querySelectorAll("[data-charts]").forEach((section) => {
  const grid = section.querySelector(".grid"), own = DATA.charts.filter((c) => c.section === section.dataset.charts).flatMap(split);
  own.forEach((chart) => {
    if (chart.kind !== "stack") return addFigure(grid, chart, lineSeries(chart), chart.title);
    RUNS.filter((run) => chart.metrics.some((m) => run.series[m])).forEach((run) =>
      addFigure(grid, chart, stackSeries(chart, run), SEVERAL ? `${chart.title} · ${run.name}` : chart.title));
  });
  if (own.length) return;
  const needed = { time: RUNS.some((run) => Object.keys(run.phases).length), health: section.querySelector("table") };
  if (needed[section.id]) grid.remove();
  else { section.remove(); document.querySelector(`nav a[href="#${section.id}"]`)?.remove(); }
});

// ---- the mean step of each run, as one bar
const shares = document.getElementById("shares");  // removed where no step was measured
if (shares) shares.className = SEVERAL ? "share" : "share single";
const longest = Math.max(...RUNS.map((run) => Object.values(run.phases).reduce((a, b) => a + b, 0)));
RUNS.forEach((run, r) => {
  const whole = Object.values(run.phases).reduce((a, b) => a + b, 0);
  if (!whole) return;
  const bar = make("div", { class: "bar", style: `width:${(100 * whole) / longest}%` });
  Object.entries(run.phases).forEach(([name, value]) => {
    if (value <= 0) return;
    const share = value / whole, label = share > 0.16 ? `${name} ${FORMS.seconds(value)}` : "";
    const text = name === "other" ? "color:var(--ink)" : "";
    bar.append(make("div", { style: `flex:${value} 0 0;background:${PHASE_COLORS[name]};${text}`, title: `${name} ${FORMS.seconds(value)} (${FORMS.percent(share)})` }, label));
  });
  if (SEVERAL) shares.append(make("span", { class: "who" }, make("span", { class: "key", style: `background:${runColor(r)}` }), run.name));
  shares.append(bar);
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
  if (row.strands > 1) top.append(make("span", {}, `${row.strands} sequences`));
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
// An episode: what the policy said, and in another color what it read.
function conversation(row, block) {
  row.turns.forEach((turn, i) => {
    const said = turn.role === "assistant";
    const facts = [turn.role || "left out"];
    if (turn.tokens) facts.push(`${turn.tokens} tokens`);
    if (turn.seconds >= 0.001) facts.push(FORMS.seconds(turn.seconds));
    if (i === 0) facts.unshift(row.prompt);
    block(facts.filter(Boolean).join(" · "), turn.text || "(empty)", said ? "turn said" : "turn read");
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
function turn(by) { pick.step.value = +pick.step.value + by; showSamples(); }
document.getElementById("earlier").addEventListener("click", () => turn(-1));
document.getElementById("later").addEventListener("click", () => turn(1));
[pick.run, pick.step, pick.filter].forEach((control) => control.addEventListener("input", showSamples));
pick.step.max = Math.max(0, RUNS[0].samples.length - 1);
pick.step.value = pick.step.max;
showSamples();
if (RUNS.every((run) => !run.samples.length)) document.getElementById("samples").remove();

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = root.dataset.theme || (dark ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
});
