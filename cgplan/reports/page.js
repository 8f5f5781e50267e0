// Draws the charts of a report in the colours that the reader prefers, searches its lists, and copies.
"use strict";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const scaled = (value, step, [name, ...larger]) => {
  if (value === 0) return "0";
  if (Math.abs(value) >= step && larger.length) return scaled(value / step, step, larger);
  return `${Number(value.toPrecision(3)).toLocaleString("en")} ${name}`;
};
const UNITS = {
  bytes: (value) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB"]),
  us: (value) => scaled(value, 1000, ["us", "ms", "s"]),
  s: (value) => scaled(value * 1e6, 1000, ["us", "ms", "s"]),
  share: (value) => `${Number((100 * value).toFixed(1))}%`,
  ratio: (value) => `${value.toFixed(2)}x`,
  count: (value) => value.toLocaleString("en"),
};
const COLOURS = {
  "graph pool": "--c1", "static buffers": "--c2", driver: "--c3", workspaces: "--c4",
  compile: "--c2", "warm-up": "--c4", capture: "--c1", "start-up": "--c1", steps: "--c1",
  "eager median": "--c2", "graph median": "--c1", "replay median": "--c3",
  cgplan: "--c1", eager: "--c2", bare: "--c3",
  "this plan": "--c1", "the best with so many graphs": "--soft", padding: "--c2", "steps so far": "--c1",
};
const FILE = Symbol("file"); // of a row: the report that it is of, where two stand beside each other
const OTHERS = ["--c5", "--c6", "--c7", "--c8", "--c3", "--c4"]; // names that COLOURS lacks, in turn
const coloured = (name, at = 0) => ({ color: colour(COLOURS[name.replace("p99", "median")] ?? OTHERS[at % OTHERS.length]) });
const unique = (rows, column) => [...new Set(rows.map((row) => row[column]))];
const ascending = (rows, column) => [...rows].sort((a, b) => Number(a[column]) - Number(b[column]) || 0);
const named = (name) => ({ name, axisPointer: { label: { precision: 0, formatter: ({ value }) => `${name}: ${Number(value) ? Math.round(value) : value}` } } });
const category = (rows, column) => ({ type: "category", data: unique(rows, column).map(String) });
const tip = (text) => ({ formatter: (item) => echarts.format.encodeHTML(text(item)) });
const value = (chart) => (
  { type: "value", splitNumber: innerWidth >= 600 ? 5 : chart.unit === "share" ? 2 : 3, axisLabel: { hideOverlap: true, formatter: UNITS[chart.unit] } });

/** How wide a text is in a chart. */
const pen = document.createElement("canvas").getContext("2d");
pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
const long = (text) => pen.measureText(text).width;

/** A name without the end of its first part, where it is too long: "PIECEWISE, 5 a...: 8". */
function shortened(name, room) {
  const [, head, tail] = name.match(/^(.*?)(:[^:]*)?$/s);
  let kept = head;
  while (kept && long(`${kept}...${tail ?? ""}`) > room) kept = kept.slice(0, -1);
  return long(name) > room ? `${kept}...${tail ?? ""}` : name;
}

/**
 * A series for each column of values, or for each name in the column `by`, and for each file; points are made of x and the
 * value. What a file has is dashed in all but the first.
 */
function series(rows, chart, type, point) {
  const parts = chart.by
    ? unique(rows, chart.by).map((name) => [name, chart.values[0], rows.filter((row) => row[chart.by] === name)])
    : chart.values.map((name) => [name, name, rows]);
  const data = (found, column) => found.map((row) => point(String(row[chart.x]), row[column]));
  const files = unique(rows, FILE);
  const others = parts.map(([of]) => of).filter((of) => !COLOURS[of]);
  return parts.flatMap(([of, column, found]) => files.map((file) => ({
    ...{ name: file ? `${of} (${file})` : of, of, file, isFirst: file === DRAWN[0][0], type, ...coloured(of, others.indexOf(of)) },
    data: data(found.filter((row) => row[FILE] === file), column),
  }))).filter((part) => part.data.length);
}

/** A point, and seven towards the next one: what is straight over sizes is bent over their logarithm. */
function between([x, y], at, points) {
  const [until, last] = points[at + 1] ?? [x, y];
  const places = [...Array(8).keys()].map((part) => Math.round(x + (part / 8) * (until - x)));
  return [...new Set(places)].filter((place) => place === x || place < until).map((place) => [place, y + ((last - y) * (place - x)) / (until - x || 1)]);
}

const KINDS = {
  lines: (rows, chart) => {
    const tails = (name) => (!rows[0][FILE] && name.endsWith("median") ? [name, name.replace("median", "p99")] : [name]);
    const withTails = chart.values.flatMap(tails);
    const every = series(rows, { ...chart, values: withTails }, "line", (x, y) => [x, y]);
    const most = Math.max(...every.flatMap((line) => line.data.map(([, y]) => y)));
    const isUnder = (line, above) => line.file === above.file &&
      line.data.every(([x, y], at) => x === above.data[at]?.[0] && Math.abs(y - above.data[at][1]) < most / 100);
    const [drawn, names] = [[], {}];
    const shown = every.map((line) => {
      const above = drawn.find((other) => isUnder(line, other));
      names[(above ?? line).name] = above ? [...names[above.name], line.of] : [line.of];
      if (above) return { ...line, symbol: "none", lineStyle: { opacity: 0 } }; // its figures stay in the tooltip
      drawn.push(line);
      if (line.name.endsWith("p99")) return { ...line, symbol: "none", lineStyle: { type: "dashed", width: 1.5 } };
      return { ...line, symbolSize: 7, lineStyle: { type: line.isFirst ? "solid" : "dashed" } };
    });
    return {
      tooltip: { trigger: "axis" },
      legend: {
        data: drawn.map(({ name }) => ({ name, itemStyle: name.endsWith("p99") ? { opacity: 0 } : {} })),
        formatter: (name) => names[name].join(", ") + name.slice(names[name][0].length),
      },
      xAxis: { ...category(ascending(rows, chart.x), chart.x), ...named(chart.x), boundaryGap: false },
      yAxis: { ...value(chart), min: 0 },
      series: shown,
    };
  },
  bars: (rows, chart) => {
    const stack = chart.stack ? "all" : undefined;
    const shown = series(rows, chart, "bar", (x, y) => [y, x]).map((bar) => ({ ...bar, stack }));
    const before = { type: "bar", stack, silent: true, color: "transparent", tooltip: { show: false } };
    const ends = rows.reduce((so, row) => [...so, so.at(-1) + chart.values.reduce((sum, part) => sum + row[part], 0)], [0]);
    const starts = chart.in_turn ? [{ ...before, data: rows.map((row, at) => [ends[at], row[chart.x]]) }] : [];
    return {
      tooltip: { trigger: "axis", axisPointer: { type: "shadow" } },
      legend: { data: shown.map((bar) => bar.name) },
      xAxis: { ...value(chart), position: "top" },
      yAxis: { ...category(rows, chart.x), inverse: true },
      series: [...starts, ...shown].map((bar) => ({ ...bar, barMaxWidth: 14 })),
    };
  },
  treemap: (rows, chart) => {
    const [size] = chart.values;
    const there = rows.filter((row) => row[size]);
    const sum = (some) => some.reduce((so, row) => so + row[size], 0);
    const whole = sum(there);
    const bytes = UNITS[chart.unit];
    const parts = unique(there, chart.by).map((name) => {
      const of = there.filter((row) => row[chart.by] === name);
      const children = of.map((row) => ({ name: row[chart.x], value: row[size], itemStyle: coloured(name) }));
      return { name, value: sum(of), itemStyle: coloured(name), children };
    }).sort((one, other) => other.value - one.value);
    const named = Object.fromEntries(parts.map(({ name, value }) => [name, `${name} ${bytes(value)}`]));
    const formatter = ({ name, value }) => (value / whole < 0.02 ? "" : `${name}\n${bytes(value)}`);
    const label = { color: colour("--on"), lineHeight: 18, formatter };
    const itemStyle = { borderColor: colour("--paper"), borderWidth: 1, gapWidth: 1 };
    const still = { animation: false, roam: false, nodeClick: false, breadcrumb: { show: false } };
    const text = ({ treePathInfo: [, part, key], value }) => `${part.name}, ${key.name}: ${bytes(value)}, ${UNITS.share(value / whole)}`;
    const map = { type: "treemap", ...still, left: 0, right: 0, bottom: 0, label, levels: [{ itemStyle }, { itemStyle }], itemStyle, data: parts };
    return {
      words: [...Object.values(named), ...there.flatMap((row) => [row[chart.x], bytes(row[size])])],
      tooltip: tip(text),
      legend: { data: Object.keys(named), formatter: (name) => named[name], selectedMode: false },
      series: [map, { type: "pie", radius: 0, silent: true, label: { show: false }, data: parts }], // the pie gives the legend its colours
    };
  },
  heat: (rows, chart, most = Math.max(...rows.map((row) => row[chart.values[0]])) || 1, say = UNITS[chart.unit]) => ({
    tooltip: tip(({ value: [x, y, share] }) => `${chart.by} ${y}, ${chart.x} ${x}: ${say(share)}`),
    xAxis: { ...category(ascending(rows, chart.x), chart.x), name: chart.x },
    yAxis: { ...category(rows, chart.by), name: chart.by },
    visualMap: {
      ...{ hoverLink: false, min: 0, max: most, text: [say(most), say(0)], inRange: { color: [colour("--low"), colour("--high")] } },
      ...{ orient: "horizontal", left: "center", bottom: 0, itemWidth: 12 },
    },
    series: [{
      type: "heatmap",
      data: rows.map((row) => [String(row[chart.x]), String(row[chart.by]), row[chart.values[0]]]),
      label: { show: rows.length < 150 && innerWidth / unique(rows, chart.x).length > 60, formatter: (item) => say(item.value[2]) },
    }],
  }),
  curve: (rows, chart) => {
    const least = Math.min(...rows.map((row) => row[chart.x]).filter(Boolean));
    const shown = series(rows, chart, "scatter", (x, y) => [Number(x), y]).map((part) => {
      const lineStyle = { type: part.isFirst ? "solid" : "dashed" };
      const line = { ...part, type: "line", lineStyle };
      if (part.of === chart.line) return { ...line, step: "end", symbolSize: 5, showSymbol: false };
      if (!chart.by) {
        const areaStyle = { opacity: part.isFirst ? 0.25 : 0 };
        return { ...line, symbol: "none", areaStyle, data: part.data.flatMap(between) };
      }
      const [x, y] = part.data[0];
      if (x === 0) {
        const dots = { type: part.isFirst ? "dotted" : "dashed", width: 1.5 };
        const level = { silent: true, symbol: "none", lineStyle: dots, label: { show: false }, data: [{ yAxis: y }] };
        return { ...line, lineStyle: dots, symbol: "none", data: [[least, y]], markLine: level };
      }
      const over = part.of === "this plan" ? { z: 3, symbolSize: 10 } : { symbolSize: 15 };
      return { ...part, ...over, symbol: part.isFirst ? "circle" : "diamond" };
    });
    const whole = { hideOverlap: true, formatter: (at) => (Number.isInteger(at) ? at.toLocaleString("en") : "") };
    return {
      tooltip: { trigger: "axis" },
      ...{ legend: {}, xAxis: { type: "log", logBase: 2, ...named(chart.x), axisLabel: whole } },
      yAxis: { ...value(chart), scale: true },
      series: shown,
    };
  },
};

function theme() {
  const [ink, soft, line] = ["--ink", "--soft", "--line"].map(colour);
  const [stroke, words] = [{ lineStyle: { color: line } }, { color: soft }];
  const name = { nameLocation: "middle", nameGap: 26, nameTextStyle: words };
  const axis = { ...name, splitLine: stroke, axisLine: stroke, axisLabel: words };
  return {
    textStyle: { fontFamily: getComputedStyle(document.body).fontFamily, color: ink },
    legend: { textStyle: words, inactiveColor: line },
    toolbox: { iconStyle: { borderColor: soft }, emphasis: { iconStyle: { borderColor: ink } } },
    visualMap: { textStyle: words },
    tooltip: { confine: true, backgroundColor: colour("--paper"), borderColor: line, textStyle: { color: ink } },
    ...{ categoryAxis: { ...axis, axisTick: { show: false } }, valueAxis: axis, logAxis: axis },
  };
}

const DRAWN = JSON.parse(document.getElementById("drawn").textContent);
const BOXES = [...document.querySelectorAll(".chart")];

const ZOOMED = ["lines", "curve"];

function draw(box) {
  const of = box.dataset;
  const parts = DRAWN.filter(([file, title]) => title === of.section && [file, ""].includes(of.file));
  const [[, , columns, , charts]] = parts.filter(([, , , , drawn]) => drawn.some((one) => one.caption === of.chart));
  const found = charts.find((one) => one.caption === of.chart);
  const chart = { ...found, unit: Object.fromEntries(columns)[found.values[0]] };
  const named = parts.flatMap(([file, , names, rows]) =>
    rows.map((row) => ({ [FILE]: of.file ? "" : file, ...Object.fromEntries(row.map((cell, i) => [names[i][0], cell])) })));
  const [where, is] = chart.where ?? [];
  const shown = where ? named.filter((row) => row[where] === is) : named;
  const option = KINDS[chart.kind](shown, chart);
  const say = (item) => (item == null ? "-" : UNITS[chart.unit](Array.isArray(item) ? item[item.length - 1] : item));
  option.animation = false;
  option.tooltip = { valueFormatter: say, ...option.tooltip };
  const top = option.legend ? legend(option, box) : -4;
  option.grid = { left: 8, right: 20, top: top + (option.yAxis?.data ? 28 : 20), bottom: option.visualMap ? 72 : 12 };
  const isDashed = chart.kind === "lines" || named[0][FILE];
  if (option.legend && !isDashed) option.legend.icon = "roundRect";
  if (chart.kind === "treemap") option.series[0].top = top + 10;
  if (ZOOMED.includes(chart.kind) && unique(shown, chart.x).length > 12) {
    const title = { zoom: "drag a range to zoom", back: "back" };
    const dataZoom = { title, yAxisIndex: "none", emphasis: { iconStyle: { textPosition: "left", textAlign: "right" } } };
    option.toolbox = { right: 0, top: 0, padding: 0, itemSize: 13, feature: { dataZoom } };
  }
  const count = option.yAxis?.data?.length;
  box.style.height = `${306 + Math.max(top, 14)}px`;
  if (count) {
    box.style.height = `${Math.max(150, 76 + Math.min(20 * count, 640)) + Math.max(top - 14, 0) + (option.visualMap ? 52 : 0)}px`;
    option.yAxis.axisLabel = { formatter: (name) => shortened(name, box.clientWidth / 3), interval: Math.floor(count / 40) };
  }
  echarts.getInstanceByDom(box)?.dispose();
  const drawn = echarts.init(box, theme(), { renderer: "svg" });
  if (option.words) drawn.on("rendered", () => emptyIfCut(box, option.words));
  drawn.setOption(option);
  if (chart.kind !== "lines") return;
  drawn.group = of.section; // lines over the same sizes: a pointer, and a zoom, are in all of them
  echarts.connect(drawn.group);
}

/** Breaks the names of a legend where they need it; how high all of them are: ECharts has at most as many rows. */
function legend(option, box) {
  const [side, gap, high] = [30, 12, 14]; // of a symbol with its margin, of two names, of a line
  const room = box.clientWidth - 50 - side; // beside the buttons for the zoom
  const broken = (text) => text.split(/(?<=[ /])/).reduce(([...lines], word) => {
    if (long(lines.at(-1) + word) > room) lines.push("");
    lines[lines.length - 1] += word;
    return lines;
  }, [""]);
  const { data, formatter = (name) => name } = option.legend;
  let [whole, row, at] = [0, 0, 0];
  for (const item of data ?? option.series.map((one) => one.name)) {
    const lines = broken(formatter(item.name ?? item));
    const width = Math.max(...lines.map(long));
    if (at && at + width > room) [whole, row, at] = [whole + row + gap, 0, 0];
    [row, at] = [Math.max(row, high * lines.length), at + width + side + gap];
  }
  const shape = { top: 0, left: 0, width: room + side + 8, padding: 0, itemGap: gap, textStyle: { lineHeight: high } };
  Object.assign(option.legend, shape, { formatter: (name) => broken(formatter(name)).join("\n") });
  return whole + row;
}

/** A label of a map that has no room for all its words has none. */
function emptyIfCut(box, words) {
  const lines = [...box.querySelectorAll("svg text")];
  const place = (line) => line.getAttribute("transform"); // of the label
  const cut = lines.filter((line) => !words.includes(line.textContent)).map(place);
  for (const line of lines) if (cut.includes(place(line))) line.textContent = "";
}

function search(field) {
  const [section, words] = [field.closest("section"), field.value.toLowerCase().split(/\s+/)];
  const rows = [...section.querySelectorAll("tbody tr")];
  for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  section.querySelector("output").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
}

/** Copies a block; where the page may not, it stays selected for Ctrl+C. */
async function copy(button) {
  const block = document.getElementById(button.dataset.copies);
  getSelection().selectAllChildren(block);
  let said = "Copied";
  try {
    await navigator.clipboard.writeText(block.textContent);
  } catch {
    said = "Selected: press Ctrl+C";
  }
  button.nextElementSibling.textContent = said;
}

document.querySelectorAll("[data-copies]").forEach((button) => button.addEventListener("click", () => copy(button)));
BOXES.forEach(draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => BOXES.forEach(draw));
const isOther = (box) => echarts.getInstanceByDom(box).getWidth() !== box.clientWidth;
new ResizeObserver(() => BOXES.filter(isOther).forEach(draw)).observe(document.body);
document.querySelectorAll("input").forEach((field) => field.addEventListener("input", () => search(field)));
