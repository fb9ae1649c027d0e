'use strict';

// The page's own script: it hands figures to plotly and answers the controls. `data` comes from page.py.

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

const find = (name) => document.getElementById(name);

async function unpack(name) {
  const bytes = Uint8Array.from(atob(find(name).textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  return new Response(stream).text();
}

// Plotly reads tags in texts, and the name of a run may look like one.
const plain = (text) => text.replaceAll('&', '&amp;').replaceAll('<', '&lt;');

function draw(name, traces, layout) {
  const whole = {...LAYOUT, ...layout};
  for (const key of ['xaxis', 'yaxis']) {
    whole[key] = {...AXIS, ...layout[key]};
    whole[key].title.standoff = 12;
  }
  return Plotly.react(find(`chart-${name}`), traces, whole, CONFIG);
}

function fill(select, options) {
  select.replaceChildren(...options.map(({value, label}) => new Option(label, value)));
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
      const few = table[name].length < 3, both = choice.names.length > 1;
      traces.push({
        type: 'scatter', x: table[axis], y: table[name], customdata: table.steps,
        name: plain(run.name) + (evaluated && both ? ', validation' : ''),
        legendgroup: String(i), showlegend: !listed,
        mode: evaluated && both ? 'markers' : evaluated || few ? 'lines+markers' : 'lines',
        line: {color: run.colour, width: 1.8},
        marker: {size: evaluated && both ? 8 : 5, color: run.colour},
        hovertemplate: '%{y:.5g}, step %{customdata:,}',
      });
      listed = true;
    }
  });
  return traces;
}

function drawCurves(data) {
  const choice = data.choices[find('curve-figure').value], axis = find('curve-axis').value;
  return draw('curves', curveTraces(choice, axis, data), {
    xaxis: {
      title: {text: data.axes[axis]}, type: find('curve-log-x').checked ? 'log' : 'linear',
      exponentformat: 'B', rangemode: 'tozero', ...(axis === 'flops' ? data.flops_axis : {}),
    },
    yaxis: {
      title: {text: choice.label}, type: find('curve-log-y').checked ? 'log' : 'linear',
      rangemode: choice.names[0].startsWith('perf/') ? 'tozero' : 'normal',
    },
    showlegend: true,
  });
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
  for (const name of ['curve-figure', 'curve-axis', 'curve-log-x', 'curve-log-y']) {
    find(name).addEventListener('input', () => drawCurves(data));
  }
  await drawCurves(data);
}

// Tables that are wider than the page.

function hintAtScrolling() {
  for (const box of document.querySelectorAll('.scroll')) {
    box.classList.toggle('wide', box.scrollWidth > box.clientWidth + 1);
  }
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

async function start() {
  hintAtScrolling();
  addEventListener('resize', hintAtScrolling);
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
  document.body.dataset.drawn = 'yes';
}

start().catch((error) => {
  find('problem').textContent = `The charts could not be drawn: ${error.message}`;
  find('problem').hidden = false;
  throw error;
});
