// Charts are drawn from what the page carries: <div class="chart" data-chart='{"x": […], "series": [{…}]}'>.
const drawn = new WeakMap();

const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function axis(format) {
  return {
    stroke: token("--soft"),
    grid: { stroke: token("--line"), width: 1 },
    ticks: { show: false },
    font: "11px ui-sans-serif, system-ui, sans-serif",
    ...format,
  };
}

const two = (number) => String(number).padStart(2, "0");

/** Hours and minutes in UTC, as everywhere else. */
function time(seconds) {
  const moment = new Date(seconds * 1000);
  return `${two(moment.getUTCHours())}:${two(moment.getUTCMinutes())}`;
}

const across = (given) => (given.xUnit ? { values: (_, ticks) => ticks.map((tick) => `${tick} ${given.xUnit}`) } : {});

function options(given, width) {
  const unit = given.unit ? ` ${given.unit}` : "";
  const shown = (_, value) => (value === null || value === undefined ? "–" : `${+value.toFixed(2)}${unit}`);
  const series = given.series.map((each, n) => ({
    label: each.label,
    stroke: token(each.color ? `--${each.color}` : `--series-${(n % 4) + 1}`),
    width: 1.75,
    dash: each.dash,
    fill: each.fill ? `${token(each.color ? `--${each.color}` : "--series-1")}22` : undefined,
    points: { show: false },
    value: shown,
  }));
  return {
    width,
    height: given.height ?? 170,
    tzDate: (seconds) => window.uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
    series: [
      given.time === false
        ? { label: given.xLabel ?? "" }
        : { label: "UTC", value: (_, seconds) => (seconds === null ? "–" : time(seconds)) },
      ...series,
    ],
    scales: {
      // Charts that stand side by side say how far they reach, so that they can be compared.
      x: { time: given.time !== false, ...(given.right && { range: [0, given.right] }) },
      y: { range: (_, low, high) => [Math.min(0, low ?? 0), (given.top || high || 1) * 1.08] },
    },
    axes: [
      axis(given.time === false ? across(given) : { size: 30, values: (_, ticks) => ticks.map(time) }),
      axis({ size: 54, values: (_, ticks) => ticks.map((tick) => `${tick.toLocaleString("en")}${unit}`) }),
    ],
    cursor: { y: false },
    legend: { live: true },
  };
}

function draw(element, text, anew) {
  const before = drawn.get(element);
  if (before && before.text === text && !anew) return;
  const given = JSON.parse(text);
  const data = [given.x, ...given.series.map((each) => each.values)];
  const shape = JSON.stringify(given.series.map((each) => each.label));
  if (before && !anew && before.shape === shape) {
    before.plot.setData(data);
    before.text = text;
    return;
  }
  before?.plot.destroy();
  const plot = new window.uPlot(options(given, element.clientWidth || 400), data, element);
  drawn.set(element, { plot, text, shape });
  if (!before) sizes.observe(element);
}

const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const plot = drawn.get(target)?.plot;
    if (plot && target.clientWidth && plot.width !== target.clientWidth) {
      plot.setSize({ width: target.clientWidth, height: plot.height });
    }
  }
});

export function drawCharts({ anew = false } = {}) {
  for (const element of document.querySelectorAll("[data-chart]")) draw(element, element.dataset.chart, anew);
}
