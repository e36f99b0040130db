/* How long callers stay away, on a logarithmic axis: gaps that end while the model is still up, and those that end cold. */

import {h} from '../paint.js';
import {sec} from '../words.js';

const WIDTH = 560;
const HEIGHT = 96;

export function gaps({bins, now_s: now, suggested_s: suggested, model}) {
  const first = Math.max(0.1, bins[0].from_s || 0.1);
  const last = Math.max(first * 4, (bins.at(-1).from_s || 1) * 2, now || 0, suggested || 0);
  const x = s => Math.max(0, Math.min(WIDTH, Math.log(Math.max(first, s) / first) / Math.log(last / first) * WIDTH));
  const most = Math.max(1, ...bins.map(one => one.n));
  const limit = now ?? Infinity;
  const bars = bins.map((one, i) => {
    const left = x(one.from_s);
    const right = i + 1 < bins.length ? x(bins[i + 1].from_s) : WIDTH;
    const tall = one.n / most * (HEIGHT - 6);
    return h('rect', {key: i, class: one.from_s < limit ? 'b kept' : 'b', x: left, y: 18 + HEIGHT - tall, width: Math.max(1, right - left - 2), height: tall, 'data-tip': `${one.n} gaps from ${sec(one.from_s)}`});
  });
  const labels = [1, 10, 60, 600, 3600, 14400, 86400].filter(s => s >= first && s <= last);
  return h('svg', {class: 'chart', viewBox: `0 0 ${WIDTH} ${HEIGHT + 36}`, role: 'img', 'aria-label': `Gaps between requests of ${model}; kept ${now ? sec(now) : 'for ever'}${suggested ? `, suggested ${sec(suggested)}` : ''}`},
    bars, h('line', {x1: 0, x2: WIDTH, y1: HEIGHT + 18, y2: HEIGHT + 18}), labels.map(s => h('text', {key: `l${s}`, x: x(s), y: HEIGHT + 32, 'text-anchor': x(s) < 20 ? 'start' : 'middle'}, sec(s))),
    now ? [h('line', {class: 'mk2', x1: x(now), x2: x(now), y1: 8, y2: HEIGHT + 18}), h('text', {x: x(now) + 4, y: 10}, `now ${sec(now)}`)] : null,
    suggested ? [h('line', {class: 'mk', x1: x(suggested), x2: x(suggested), y1: 8, y2: HEIGHT + 18}), h('text', {class: 'hi', x: x(suggested) - 4, y: 10, 'text-anchor': 'end'}, `suggested ${sec(suggested)}`)] : null);
}
