'use strict';

// The page's own part: it hands figures to plotly and answers the controls. `data` comes from page.py.

const FONT = {family: 'system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif', size: 13};
const LAYOUT = {
  font: FONT,
  margin: {l: 50, r: 16, t: 24, b: 50},
  hovermode: 'x unified',
  legend: {orientation: 'h', y: 1.02, yanchor: 'bottom'},
  paper_bgcolor: '#fff',
  plot_bgcolor: '#fff',
};
const AXIS = {gridcolor: '#eceef0', zerolinecolor: '#d5d8dc', linecolor: '#9aa0a6', ticks: 'outside', automargin: true};
const CONFIG = {
  displaylogo: false, responsive: true, showTips: false,
  // Where nothing hovers, the buttons would always lie over the legend.
  displayModeBar: matchMedia('(hover: none), (max-width: 600px)').matches ? false : 'hover',
  modeBarButtonsToRemove: ['select2d', 'lasso2d', 'autoScale2d'],
};
const WEIGHTS = [[0, '#2166ac'], [0.25, '#92c5de'], [0.5, '#ffffff'], [0.75, '#f4a582'], [1, '#b2182b']];
const BEND = 5, LEVELS = 127;  // of the scale of weights in a map: see looks.py

const find = (name) => document.getElementById(name);

async function unpack(name) {
  const bytes = Uint8Array.from(atob(find(name).textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  return new Response(stream).text();
}

// Plotly reads tags in texts, and a token of a text may look like one.
const plain = (text) => text.replaceAll('&', '&amp;').replaceAll('<', '&lt;');

const digits = (value) => value ? value.toPrecision(3).replace('-', '−') : '0';

function draw(name, traces, layout) {
  const whole = {...LAYOUT, ...layout};
  for (const key of ['xaxis', 'yaxis', ...Object.keys(layout)]) {
    if (!/^[xy]axis/.test(key)) continue;
    whole[key] = {...AXIS, ...layout[key]};
    if (whole[key].title) whole[key].title.standoff = 12;
    if (whole[key].ticktext) whole[key].ticktext = whole[key].ticktext.map(plain);
  }
  return Plotly.react(find(`chart-${name}`), traces, whole, CONFIG);
}

function fill(select, options) {
  const before = select.value;
  select.replaceChildren(...options.map(({value, label}) => new Option(label, value)));
  if (options.some(({value}) => String(value) === before)) select.value = before;
}

function onChange(names, action) {
  for (const name of names) find(name).addEventListener('input', action);
}

// Curves.

function curveTraces(choice, axis, data) {
  const traces = [];
  data.runs.forEach((run, i) => {
    let listed = false;
    for (const name of choice.names) {
      const evaluated = name.startsWith('eval/');
      const table = run.tables[evaluated ? 'eval' : 'train'];
      if (!table || !table[name] || !table[axis]) continue;
      const few = table[name].length < 3;
      traces.push({
        type: 'scatter', x: table[axis], y: table[name], customdata: table.steps,
        name: plain(run.name) + (evaluated && choice.names.length > 1 ? ', validation' : ''),
        legendgroup: String(i), showlegend: !listed,
        mode: evaluated || few ? 'lines+markers' : 'lines',
        line: {color: run.colour, width: evaluated ? 1.2 : 1.8, dash: evaluated ? 'dash' : 'solid'},
        marker: {size: 5},
        hovertemplate: '%{y:.5g}, step %{customdata:,}',
      });
      listed = true;
    }
  });
  return traces;
}

function drawCurves(data) {
  const choice = data.choices[find('curve-figure').value], axis = find('curve-axis').value;
  const of = (table, name) => table && table[name];
  const present = Object.keys(data.axes).filter((name) =>
    data.runs.some((run) => Object.values(run.tables).some((table) => of(table, name))));
  return draw('curves', curveTraces(choice, axis, data), {
    xaxis: {
      title: {text: data.axes[axis]}, type: find('curve-log-x').checked ? 'log' : 'linear',
      exponentformat: 'B', ...(axis === 'flops' ? data.flops_axis : {}),
    },
    yaxis: {title: {text: choice.label}, type: find('curve-log-y').checked ? 'log' : 'linear'},
    showlegend: true,
  }).then(() => present);
}

async function startCurves(data) {
  const groups = new Map();
  data.choices.forEach((choice, i) => {
    if (!groups.has(choice.group)) {
      groups.set(choice.group, Object.assign(document.createElement('optgroup'), {label: choice.group}));
    }
    groups.get(choice.group).append(new Option(choice.label, i));
  });
  find('curve-figure').replaceChildren(...groups.values());
  const shown = data.runs.flatMap((run) => Object.values(run.tables));
  const axes = Object.keys(data.axes).filter((axis) => shown.some((table) => table[axis]));
  fill(find('curve-axis'), axes.map((axis) => ({value: axis, label: data.axes[axis]})));
  onChange(['curve-figure', 'curve-axis', 'curve-log-x', 'curve-log-y'], () => drawCurves(data));
  await drawCurves(data);
}

// Samples.

function startSamples(data) {
  const run = find('sample-run'), step = find('sample-step');
  const show = () => {
    const {texts} = data.samples[run.value];
    const {step: at, text} = texts[Math.min(step.value, texts.length - 1)];
    find('sample-at').textContent = at.toLocaleString('en');
    find('sample-text').textContent = text;
  };
  const choose = () => {
    step.max = data.samples[run.value].texts.length - 1;
    step.value = step.max;
    show();
  };
  fill(run, data.samples.map(({name}, i) => ({value: i, label: name})));
  run.addEventListener('input', choose);
  step.addEventListener('input', show);
  choose();
}

// Maps of weights.

function mapTrace(map, labels) {
  const bytes = Uint8Array.from(atob(map.levels), (letter) => letter.charCodeAt(0));
  const levels = new Int8Array(bytes.buffer), columns = levels.length / map.rows;
  const weight = (level) => Math.sinh(level / LEVELS * Math.asinh(BEND)) / BEND * map.limit;
  const level = (part) => Math.asinh(BEND * part) / Math.asinh(BEND) * LEVELS;
  const grid = Array.from({length: map.rows}, (_, row) =>
    Array.from(levels.subarray(row * columns, (row + 1) * columns)));
  const ticks = [-1, -0.5, -0.2, 0, 0.2, 0.5, 1];
  return {
    type: 'heatmap', z: grid, zmin: -LEVELS, zmax: LEVELS, colorscale: WEIGHTS,
    x: Array.from({length: columns}, (_, i) => i * map.each + (map.each - 1) / 2),
    y: labels.map((_, i) => i),
    text: grid.map((row, i) => row.map((value) => `${plain(labels[i])}: ${digits(weight(value))}`)),
    hovertemplate: 'parameter token %{x}<br>%{text}<extra></extra>',
    colorbar: {
      thickness: 12, tickvals: ticks.map(level), ticktext: ticks.map((part) => digits(part * map.limit)),
    },
  };
}

function drawMap(data) {
  const {labels, layers} = data.maps[find('map-run').value];
  const map = layers[find('map-layer').value][find('map-kind').value];
  const ends = map.parts.slice(0, -1).map(({end}) => end);
  return draw('maps', [mapTrace(map, labels)], {
    height: 130 + 17 * labels.length,
    margin: {...LAYOUT.margin, t: 34},
    xaxis: {title: {text: 'parameter token'}, showgrid: false, range: [-0.5, map.tokens - 0.5]},
    yaxis: {
      title: {text: 'token of the text'}, autorange: 'reversed', showgrid: false,
      tickvals: labels.map((_, i) => i), ticktext: labels, tickfont: {size: 10},
    },
    hovermode: 'closest',
    shapes: ends.map((end) => ({
      type: 'line', x0: end - 0.5, x1: end - 0.5, y0: 0, y1: 1, yref: 'paper', line: {width: 1.2},
    })),
    annotations: map.parts.map(({name, end}, i) => ({
      text: name, showarrow: false, x: ((ends[i - 1] ?? 0) + end) / 2, y: 1, yref: 'paper',
      yanchor: 'bottom',
    })),
  });
}

async function startMaps(data) {
  const run = find('map-run'), layer = find('map-layer'), kind = find('map-kind');
  const places = () => Object.entries(data.maps[run.value].layers).flatMap(([number, kinds]) =>
    Object.keys(kinds).map((name) => [number, name]));
  const choose = () => {
    const {layers} = data.maps[run.value];
    fill(layer, Object.keys(layers).map((number) => ({value: number, label: number})));
    fill(kind, Object.keys(layers[layer.value]).map((name) => ({value: name, label: name})));
    return drawMap(data);
  };
  const move = (by) => {
    const all = places();
    const at = all.findIndex(([number, name]) => number === layer.value && name === kind.value);
    const [number, name] = all[(at + by + all.length) % all.length];
    layer.value = number;
    choose();
    kind.value = name;
    return drawMap(data);
  };
  fill(run, data.maps.map(({name}, i) => ({value: i, label: name})));
  onChange(['map-run', 'map-layer', 'map-kind'], choose);
  find('map-back').addEventListener('click', () => move(-1));
  find('map-next').addEventListener('click', () => move(1));
  await choose();
}

async function start() {
  if (typeof DecompressionStream === 'undefined') {
    throw new Error('this browser is too old to draw them');
  }
  const [library, content] = await Promise.all([unpack('library'), unpack('data')]);
  const script = document.createElement('script');
  script.textContent = library;
  document.head.append(script);
  const data = JSON.parse(content);
  await startCurves(data);
  for (const [name, {data: traces, layout}] of Object.entries(data.figures)) {
    await draw(name, traces, layout);
  }
  if (data.samples.length) startSamples(data);
  if (data.maps.length) await startMaps(data);
  document.body.dataset.drawn = 'yes';
}

start().catch((error) => {
  find('problem').textContent = `The charts could not be drawn: ${error.message}`;
  find('problem').hidden = false;
  throw error;
});
