/* Small pieces that several pages share. */

import {h} from './paint.js';
import {WORD, many, percent, sec} from './words.js';
import {modelHref, ui} from './store.js';

export const glyph = (name, extra = '') => h('svg', {class: `g ${extra}`, 'aria-hidden': 'true'}, h('use', {href: `#g-${name}`}));

export function stateOf(m) {
  return h('span', {class: `st s-${m.face}`}, glyph(m.face), m.fetch?.stage === 'queued' ? 'waits to be fetched' : WORD[m.face] || m.face, m.absent && m.fetch?.share != null ? ` ${percent(m.fetch.share)}` : '',
    m.state === 'asleep' && m.level ? ` · level ${m.level}` : '', m.state === 'failed' && m.retry_s ? ` · again in ${sec(Math.ceil(m.retry_s))}` : '');
}

/** A model's name, as a way to its page. */
export const nameOf = (id, extra = 'name') => h('a', {class: extra, href: modelHref(id), title: id.length > 28 ? id : null}, id);

export const pinMark = m => (m.pinned ? [' ', h('span', {class: 'pinned', title: 'pinned'}, glyph('pin', 'mut'), h('span', {class: 'vh'}, ' pinned'))] : null);

/** How many slots are busy; what is too many to draw is written. */
export function pips(m) {
  if (m.parallel == null) return m.inFlight ? `${m.inFlight} running` : h('span', {class: 'mut'}, 'idle');
  if (m.parallel > 16) return `${m.inFlight} of ${m.parallel}`;
  const label = `${m.inFlight} of ${many(m.parallel, 'slot')} busy`;
  return h('span', {class: 'pips', role: 'img', 'aria-label': label}, Array.from({length: m.parallel}, (_, i) => h('i', {class: i < m.inFlight ? 'on' : ''})));
}

export const rateOf = m => (m.rate?.value ? `${m.rate.value >= 10 ? Math.round(m.rate.value) : m.rate.value.toFixed(1)} ${m.rate.unit}` : '');

/** A table's head: [text, classes, hidden?] each. */
export const head = cells => h('thead', {}, h('tr', {}, cells.map(([text, cls = '', hidden = false]) =>
  h('th', {class: cls, scope: 'col'}, hidden ? h('span', {class: 'vh'}, text) : text))));

export const cols = shares => h('colgroup', {}, shares.map(share => h('col', {style: share ? {width: `${share}%`} : {}})));

export const cell = (value, cls = '') => h('td', {class: cls}, value);

/** One bar out of parts, each with its own texture. */
export function stack(parts, scale, cls, names) {
  const said = parts.map((value, i) => (value > 0.004 ? `${names[i]} ${sec(value)}` : '')).filter(Boolean);
  return h('div', {class: 'stack', role: 'img', 'aria-label': said.join(', ') || 'no time', 'data-tip': said.join('\n') || null},
    parts.map((value, i) => (value > 0.004 ? h('i', {class: cls + i, style: {width: `${Math.min(100, value / scale * 100)}%`}}) : null)));
}

export const legend = (names, cls) => h('p', {class: 'legend'}, names.map((name, i) => h('span', {}, h('i', {class: cls + i}), name)));

export const meter = (fill, tick, label, cls = '') => h('div', {class: 'meter', role: 'img', 'aria-label': label},
  h('i', {class: cls, style: {width: `${Math.max(0, Math.min(100, fill * 100))}%`}}), tick == null ? null : h('u', {style: {left: `${Math.min(100, tick * 100)}%`}}));

/** One of a few, as buttons. */
export const choice = (label, options, now, choose) => h('div', {class: 'seg', role: 'group', 'aria-label': label}, options.map(([value, text]) =>
  h('button', {type: 'button', key: value, 'aria-pressed': String(value === now), onclick: () => choose(value)}, text)));

export const select = (label, options, now, choose) => h('select', {'aria-label': label, value: now, onchange: event => choose(event.target.value)},
  options.map(([value, text]) => h('option', {key: value, value}, text)));

/** A part of a page that this server cannot fill. */
export const unavailable = (title, text) => h('div', {class: 'nodata'}, glyph('stopped'), h('p', {}, h('b', {}, title), ' ', text));

export const blank = (title, ...body) => h('div', {class: 'blank'}, h('h1', {}, title), ...body);

/** A model's story, oldest first; what it waits for now is the last. */
export function storyOf(told, clockOf) {
  if (!told || told.story === null) return h('p', {class: 'mut'}, 'Reading…');
  if (!told.story.length) return h('p', {class: 'mut'}, 'Nothing has been decided about it yet.');
  return h('dl', {class: 'story'}, told.story.map((one, i) => {
    const isNow = one.now ?? i === told.story.length - 1;
    return [h('dt', {}, h('time', {}, one.now ? 'now' : clockOf(one.at))), h('dd', {class: isNow ? 'now' : ''}, one.text)];
  }), told.off ? [h('dt', {}, ''), h('dd', {class: 'mut'}, told.off)] : null);
}

/** Whether a model is one that the user looks for. */
export function isFound(m) {
  const wanted = ui.find.toLowerCase();
  return !wanted || [m.id, m.engine, ...m.aliases].some(text => text.toLowerCase().includes(wanted));
}
