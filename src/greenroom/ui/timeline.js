/* Who held which memory in the last quarter of an hour: time to the right, memory upwards, the same pixels for a GiB on
   every device; who waited stands above, on the same axis. Painted at most once a second; the cursor is moved by itself. */

import {h, lazy} from './paint.js';
import {WORD, clock, gib, hueOf, sec} from './words.js';
import {serverNow, store} from './store.js';

const SPAN_S_MAX = 900;
const SPAN_S_MIN = 120;
const WAIT_ROWS = 5;
const HEIGHT_MAX = 300; // of all lanes together
const SOLID = new Set(['ready', 'draining']);

let width = 860;
let shown = null; // what the cursor reads: {lo, hi, spans, waits, devices}
let cursorAt = null;

export function measureTimeline() {
  const found = document.getElementById('tlbox')?.clientWidth;
  const changed = found && Math.abs(found - width) > 1;
  if (changed) width = found;
  return !!changed;
}

/** The picture, painted anew once a second. */
export function timeline(picture) {
  const told = store.timeline;
  const second = store.link === 'live' ? Math.floor(serverNow()) : -1;
  return h('div', {id: 'tlbox'}, lazy('tl', [told, second, width, picture.devices.length], () => draw(told, picture)),
    h('div', {id: 'cur', class: 'cur', hidden: cursorAt == null, key: 'cur'}));
}

function draw(told, picture) {
  const hi = told.now && store.link !== 'live' ? told.now : serverNow();
  const lo = hi - spanOf(picture);
  const x = at => Math.max(0, Math.min(width, (at - lo) / (hi - lo) * width));
  const devices = picture.cards;
  const perGib = Math.min(innerWidth >= 1900 ? 1.9 : 1.25, HEIGHT_MAX / Math.max(1, devices.reduce((a, d) => a + d.capacity_mib, 0) / 1024));
  const spans = (told.spans || []).map(one => ({...one, to: one.to ?? hi})).filter(one => one.to > lo);
  const waits = (told.waits || []).map(one => ({...one, to: one.to ?? hi})).filter(one => one.to > lo).sort((a, b) => a.from - b.from);
  shown = {lo, hi, spans, waits, devices};
  const rows = waitRows(waits, x, hi);
  let y = rows.length ? 20 + rows.count * 7 + 4 : 18;
  const lanes = [];
  for (const d of devices) {
    const height = Math.max(14, d.capacity_mib / 1024 * perGib);
    y += 17;
    lanes.push(lane(d, y, height, spans.filter(one => one.device === d.id), x));
    lanes.push((told.swaps || []).filter(one => one.at > lo && holds(spans, d.id, one)).map(one =>
      h('line', {class: 'swap', x1: x(one.at), x2: x(one.at), y1: y - 6, y2: y - 1})));
    y += height;
  }
  return h('svg', {
    class: 'tl', id: 'tl', viewBox: `0 0 ${width} ${Math.ceil(y + 2)}`, tabindex: '0', role: 'img',
    'aria-label': 'Who held the memory of each device lately. The arrow keys read it moment by moment.',
  }, axis(lo, hi, x, y), rows.list, lanes);
}

/** A quarter of an hour; less as long as the server is younger than that. */
export function spanOf(picture) {
  const up = (picture.uptime_s ?? SPAN_S_MAX) + (performance.now() - picture.seen) / 1000;
  return Math.max(SPAN_S_MIN, Math.min(SPAN_S_MAX, Math.ceil(up / 60) * 60));
}

function axis(lo, hi, x, y) {
  const marks = [];
  const step = [30, 60, 120, 180].find(one => (hi - lo) / one <= 6);
  for (let at = Math.ceil(lo / step) * step; at < hi; at += step) {
    marks.push(h('line', {class: 'grid', x1: x(at), x2: x(at), y1: 14, y2: y}));
    if (x(at) > 16 && x(at) < width - 14) marks.push(h('text', {class: 'ax', x: x(at), y: 9, 'text-anchor': 'middle'}, clock(at, step % 60 === 0)));
  }
  return marks;
}

function waitRows(waits, x, hi) {
  const ends = [];
  const list = [];
  for (const one of waits) {
    let row = ends.findIndex(end => end < one.from - 1);
    if (row < 0) row = ends.push(0) - 1;
    ends[row] = one.to;
    if (row >= WAIT_ROWS) continue;
    const gate = Math.min(one.to, Math.max(one.from, one.gate_until ?? one.from));
    const tip = `${one.model} waited ${sec(one.to - one.from)}${one.to >= hi ? ' so far' : ''}\n${sec(gate - one.from)} behind the gate, ${sec(one.to - gate)} for sleep, wake or load`;
    const at = {y: 18 + row * 7, height: 5, 'data-tip': tip, 'data-m': one.model};
    list.push(h('rect', {...at, class: 'w1', x: x(one.from), width: Math.max(0, x(gate) - x(one.from))}),
      h('rect', {...at, class: 'w2', x: x(gate), width: Math.max(1, x(one.to) - x(gate))}));
  }
  list.count = Math.min(WAIT_ROWS, ends.length);
  return {list, count: list.count, length: list.length};
}

function lane(d, y, height, spans, x) {
  const scale = height / d.capacity_mib;
  return [
    h('text', {class: 'ax', x: 0, y: y - 5}, `${d.isRam ? 'Host RAM' : d.id} · ${gib(d.capacity_mib)} GiB`),
    h('rect', {class: 'lane', x: 0, y, width, height}),
    spans.map(one => span(one, y + height, scale, y, x)),
  ];
}

function span(one, floor, scale, ceiling, x) {
  const left = x(one.from);
  const wide = Math.max(1, x(one.to) - left);
  const tall = Math.max(2, one.mib * scale - 1);
  const top = Math.max(ceiling, floor - ((one.offset_mib || 0) + one.mib) * scale);
  const at = {x: left.toFixed(1), y: top.toFixed(1), width: wide.toFixed(1), height: tall.toFixed(1), style: {'--h': String(hueOf(one.model))}, 'data-m': one.model};
  const asleep = one.state === 'asleep';
  const tip = `${one.model}: ${WORD[one.state] || one.state}\n${clock(one.from)} to ${clock(one.to)} (${sec(one.to - one.from)}) · ${gib(one.mib)} GiB`;
  const short = one.model.split(/[-/:]/)[0];
  const label = [one.model, short].find(text => wide > text.length * 6.4 + 8);
  return [
    h('rect', {...at, class: asleep ? 'seg hollow' : 'seg', 'data-tip': tip}),
    asleep ? null : h('rect', {...at, height: 1.5, class: 'edge'}),
    SOLID.has(one.state) || asleep ? null : h('rect', {...at, class: 'over-hatch', fill: 'url(#hatch)'}),
    one.state === 'draining' ? h('rect', {...at, class: 'over-hatch', fill: 'url(#stripe)'}) : null,
    one.state === 'ready' && tall > 11 && label ? h('text', {x: left + 5, y: top + Math.min(tall / 2 + 4, 15)}, label) : null,
  ];
}

const holds = (spans, device, swap) => spans.some(one => one.device === device && one.model === swap.in);

// ---- reading it

/** Everything that was true at a moment, as lines. */
export function readAt(at) {
  if (!shown) return '';
  const lines = shown.devices.map(d => {
    const who = shown.spans.filter(one => one.device === d.id && one.from <= at && one.to >= at && one.state !== 'asleep')
      .map(one => (one.state === 'ready' ? one.model : `${one.model} (${WORD[one.state] || one.state})`));
    return `${d.isRam ? 'Host RAM' : d.id}: ${who.join(', ') || 'nobody'}`;
  });
  const waiting = shown.waits.filter(one => one.from <= at && one.to > at).length;
  return [clock(at), ...lines, `${waiting} waiting`].join('\n');
}

/** Moves the cursor to a moment (null: takes it away) and says what was true then. */
export function moveCursor(at) {
  cursorAt = at == null || !shown ? null : Math.max(shown.lo, Math.min(shown.hi, at));
  const line = document.getElementById('cur');
  if (line) {
    line.hidden = cursorAt == null;
    if (cursorAt != null) line.style.setProperty('left', `${cursorFraction() * 100}%`);
  }
  return cursorAt == null ? '' : readAt(cursorAt);
}

export const atFraction = fraction => (shown ? shown.lo + fraction * (shown.hi - shown.lo) : null);
export const stepCursor = seconds => moveCursor((cursorAt ?? shown?.hi ?? 0) + seconds);
export const cursorFraction = () => (cursorAt == null ? 1 : (cursorAt - shown.lo) / (shown.hi - shown.lo));
