/* A device as one bar, drawn to its own scale. The outline of a block is what is reserved, its fill what was measured;
   under the bar a bracket shows what a waiting model needs and what is in its way. */

import {h} from './paint.js';
import {WORD, gib, many, sec, sum} from './words.js';
import {glyph, rateOf} from './parts.js';
import {modelHref} from './store.js';

const AIM_PX = 24; // a narrower block is picture only; its row below is the control
const OVER_MIB = 52; // measured above the book by more than rounding

let barWidth = 860;

/** Called after each painting: how wide bars are now. */
export function measureBars() {
  const width = document.querySelector('.bar')?.clientWidth;
  const changed = width && Math.abs(width - barWidth) > 1;
  if (changed) barWidth = width;
  return !!changed;
}

/** The parts of a bar, in MiB. What does not fit into the capacity stretches the scale: nothing is drawn outside. */
export function measuresOf(d, waitingId) {
  const pieces = waitingId ? [...d.pieces].sort((a, b) => residue(a, waitingId) - residue(b, waitingId)) : d.pieces;
  const reserved = sum(pieces.map(one => one.size));
  const whole = Math.max(d.capacity_mib, d.outside_mib + reserved + d.headroom_mib, 1);
  return {pieces, reserved, whole, free: Math.max(0, d.capacity_mib - d.outside_mib - reserved - d.headroom_mib)};
}

const residue = (piece, id) => (piece.state === 'asleep' ? (piece.model.id === id ? 2 : 1) : 0);

export function device(d, picture, caption = '') {
  const need = picture.queue.find(one => one.device === d.id && one.short_mib > 0);
  const {pieces, reserved, whole, free} = measuresOf(d, need?.model);
  const share = mib => `${(mib / whole * 100).toFixed(3)}%`;
  const used = d.used_mib == null ? 'not measured' : `${gib(d.used_mib)} used${d.isRam ? ' by all programs' : ''}`;
  return h('div', {class: 'dev', key: d.id},
    h('div', {class: 'cap'}, h('b', {}, d.isRam ? 'Host RAM' : d.id), h('span', {class: 'cap-name'}, caption || (d.name === d.id ? '' : d.name)),
      h('span', {class: 'n'}, `${used} · ${gib(d.reserved_mib ?? reserved)} reserved of ${gib(d.capacity_mib)} GiB`)),
    h('div', {class: 'bar', role: 'group', 'aria-label': `Memory of ${d.isRam ? 'host RAM' : d.id}`},
      d.outside_mib ? h('div', {key: '\noutside', class: 'out', style: {width: share(d.outside_mib)}, 'data-tip': outsideTip(d)}) : null,
      pieces.map(one => block(one, share, whole)),
      h('div', {key: '\nfree', class: 'free'}, h('span', {}, `${gib(free)} free`)),
      d.headroom_mib ? h('div', {key: '\nroom', class: 'room', style: {width: share(d.headroom_mib)}, 'data-tip': `Headroom: ${gib(d.headroom_mib)} GiB kept empty`}) : null),
    need ? bracket(need, d, free, whole) : scale(d, whole));
}

function outsideTip(d) {
  const by = (d.outside_by || []).map(one => `${one.name || 'a program'}, pid ${one.pid}`).join('\n') || d.holder || '';
  return `Outside greenroom: ${gib(d.outside_mib)} GiB${by ? `\n${by}` : ''}`;
}

function block({model: m, instance, index, size, fill, copy, key, state, isLinked}, share, whole) {
  const over = fill != null && fill > size + OVER_MIB;
  const slim = size / whole * barWidth < AIM_PX;
  const known = fill ?? size;
  const figures = copy || fill == null ? `${gib(size)} GiB${copy ? '' : ' reserved'}` : `${gib(fill)} of ${gib(size)} GiB`;
  const name = index ? `${m.id} ·${index + 1}` : m.id;
  const told = `${WORD[state] || state}${state === 'asleep' && instance.level ? ` level ${instance.level}` : ''}`;
  const drawn = copy ? 'asleep' : state;
  return h(slim ? 'div' : 'a', {
    key, class: `blk s-${drawn}${over ? ' over' : ''}${fill == null && !copy ? ' guess' : ''}`, 'data-m': m.id, href: slim ? null : modelHref(m.id),
    'aria-hidden': slim ? 'true' : null,
    'aria-label': slim ? null : `${name}, ${told}, ${gib(size)} GiB reserved${fill == null ? '' : `, ${gib(fill)} measured`}, ${instance.in_flight || 0} running, ${m.queued} waiting`,
    'data-tip': `${name}\n${told}${m.note ? ` · ${m.note}` : ''}\n${copy ? 'holds' : 'reserved'} ${gib(size)} GiB${fill == null ? '' : ` · measured ${gib(fill)} GiB${over ? ' (over its book)' : ''}`}`,
    style: {width: share(size), '--h': String(m.hue), '--m': `${Math.min(100, known / size * 100).toFixed(1)}%`},
  }, h('div', {},
    h('div', {class: `name s-${state}`}, glyph(state), h('span', {}, name), m.pinned ? glyph('pin', 'pin') : null, isLinked ? glyph('link', 'pin') : null),
    h('p', {}, doing(m, instance, copy)),
    h('p', {class: 'soft'}, figures)));
}

function doing(m, instance, copy) {
  const {state} = instance;
  if (copy && state !== 'asleep') return 'copy kept for its sleep';
  if (state === 'ready') {
    const rate = rateOf(m);
    return [instance.in_flight ? `${instance.in_flight} running` : m.idle_s == null ? 'ready' : m.idle_s < 1 ? 'idle' : `idle ${sec(m.idle_s)}`, m.queued ? ` · ${m.queued} waiting` : '', rate ? ` · ${rate}` : ''];
  }
  if (state === 'draining') return `draining · ${instance.in_flight} left`;
  if (m.progress || m.expected_s == null) return `${WORD[state]}${m.note ? ` · ${m.note}` : ''}`;
  return m.expected_s > 0 ? `${WORD[state]} · ≈ ${sec(Math.max(1, Math.round(m.expected_s)))}` : `${WORD[state]} · longer than usual`;
}

function scale(d, whole) {
  const gibs = whole / 1024;
  const step = [0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500].find(one => gibs / one <= 6) || 1000;
  const ticks = Array.from({length: Math.ceil(gibs / step)}, (_, i) => i * step).filter(one => one < gibs * 0.87);
  return h('div', {class: 'under', 'aria-hidden': 'true'}, ticks.map(one => h('span', {key: `t${one}`, style: {left: `${one / gibs * 100}%`}}, one)),
    h('span', {key: 'end', class: 'end', style: {left: '100%'}}, `${gib(whole)} GiB`));
}

/** need = short + held + free: the sum that is drawn adds up. */
function bracket(need, d, free, whole) {
  const fits = Math.min(whole - d.headroom_mib, (need.held_mib || 0) + (need.free_mib ?? free));
  const right = d.headroom_mib;
  const lack = Math.min(need.short_mib, whole - right - fits);
  const place = (from, size) => ({right: `${from / whole * 100}%`, width: `${size / whole * 100}%`});
  const roomLeft = 1 - (right + fits + lack) / whole;
  const inside = roomLeft * barWidth < 300;
  return h('div', {class: `need${inside ? ' below' : ''}`},
    h('div', {class: 'lack', style: place(right + fits, lack)}), h('div', {class: 'fits', style: place(right, fits)}),
    h('p', {style: inside ? {} : {right: `${(right + fits + lack) / whole * 100}%`}}, h('b', {}, need.model), ` needs ${gib(need.need_mib)} GiB here, `,
      h('b', {class: 'warn'}, `${gib(need.short_mib)} short`),
      need.victims?.length ? h('span', {class: 'vh'}, `; in the way: ${need.victims.map(one => one.model || one).join(', ')}`) : null));
}

export const countOn = list => (list.length ? many(list.length, 'model') : 'nobody');
