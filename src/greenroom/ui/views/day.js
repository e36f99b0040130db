/* A day of one model: high while on stage, low while asleep, nothing while stopped. */

import {h} from '../paint.js';
import {WORD, clock, sec} from '../words.js';

const WIDTH = 600;
const DAY_S = 86400;

export function day(spans, now) {
  const from = now - DAY_S;
  const x = at => Math.max(0, Math.min(WIDTH, (at - from) / DAY_S * WIDTH));
  const shown = spans.map(one => ({...one, to: one.to ?? now})).filter(one => one.to > from);
  const hours = [];
  for (let at = Math.ceil(from / 21600) * 21600; at < now; at += 21600) hours.push(at);
  return [h('svg', {class: 'chart', viewBox: `0 0 ${WIDTH} 62`, role: 'img', 'aria-label': `On stage ${sec(total(shown, from, false))}, asleep ${sec(total(shown, from, true))} of the last day`},
    shown.map(one => {
      const asleep = one.state === 'asleep';
      return h('rect', {x: x(one.from), y: asleep ? 28 : 10, width: Math.max(1, x(one.to) - x(one.from)), height: asleep ? 16 : 34, class: asleep ? 'b low' : 'b kept',
        'data-tip': `${WORD[one.state] || one.state}\n${clock(one.from)} to ${clock(one.to)} (${sec(one.to - one.from)})`});
    }),
    h('line', {x1: 0, x2: WIDTH, y1: 44.5, y2: 44.5}),
    hours.map(at => h('text', {x: x(at), y: 58, 'text-anchor': x(at) < 20 ? 'start' : x(at) > WIDTH - 20 ? 'end' : 'middle'}, clock(at, true)))),
  h('p', {class: 'mut'}, shown.length ? 'Solid: on stage. Outline: asleep. Blank: stopped.' : 'It was not up in the last day.')];
}

const total = (spans, from, asleep) => spans.filter(one => (one.state === 'asleep') === asleep).reduce((a, one) => a + one.to - Math.max(from, one.from), 0);
