/* Models: find one of two hundred. */

import {buttons, wordFor} from '../acts.js';
import {h, lazy} from '../paint.js';
import {cell, choice, cols, head, isFound, nameOf, pinMark, stateOf} from '../parts.js';
import {lockedBecause, put, setQuery, ui} from '../store.js';
import {families, gib, many, sec} from '../words.js';

const PLACES = [['stage', 'On stage'], ['green', 'Green room'], ['home', 'At home']];
const SHOWN_MAX = 30; // of a group, in a long list
const LONG = 60;

export function models(picture, {query}) {
  const by = query.get('by') || 'place';
  const list = picture.models.filter(isFound);
  const title = ui.find ? `${list.length} of ${many(picture.models.length, 'model')}` : many(picture.models.length, 'model');
  return h('div', {class: 'pad'}, h('h1', {}, title),
    h('div', {class: 'tools'}, h('span', {class: 'mut'}, 'Group by'), choice('Group by', [['place', 'place'], ['engine', 'engine'], ['family', 'family']], by, value => setQuery('by', value === 'place' ? '' : value))),
    groupsOf(list, by).map(([name, group]) => section(`${by}\n${name}`, name, group, list.length)),
    list.length ? null : h('p', {class: 'mut'}, `Nothing is called “${ui.find}”.`));
}

function groupsOf(list, by) {
  if (by === 'family') return families(list);
  if (by === 'engine') return [...new Set(list.map(one => one.engine))].sort().map(name => [name || 'unknown engine', list.filter(one => one.engine === name)]);
  return PLACES.map(([place, name]) => [name, list.filter(one => one.place === place)]).filter(([, group]) => group.length);
}

const HEADINGS = [['model', '', true], ['state', '', true], ['engine', 'opt'], ['needs', 'n'], ['wakes in', 'n opt'], ['cold start', 'n'], ['last used', 'opt gap'], ['actions', 'acts', true]];

function section(key, name, group, total) {
  const shown = total < LONG || ui.open[key] ? group : group.slice(0, SHOWN_MAX);
  return h('details', {key, open: true, class: 'grp'}, h('summary', {}, h('b', {}, name), h('small', {}, many(group.length, 'model'))),
    h('div', {class: 'wide'}, h('table', {class: 'even'}, h('caption', {class: 'vh'}, name), cols([22, 18, 12, 10, 9, 9, 9, 11]), head(HEADINGS), h('tbody', {}, shown.map(row)))),
    shown.length < group.length ? h('button', {type: 'button', class: 'quiet', onclick: () => {
      ui.open[key] = true;
      put();
    }}, `Show all ${group.length}`) : null);
}

function row(m) {
  const word = wordFor(m.id);
  // a model at home is the same object until something changes: its row is not described again
  return [lazy(m.id, [m, lockedBecause(), word ? {} : null, m.place === 'home' && !buttons(m)[0].props.disabled], () => h('tr', {'data-m': m.id, title: m.trouble},
    cell([nameOf(m.id), pinMark(m)]), cell([stateOf(m), m.blocked ? h('small', {class: 'warn opt'}, ' · cannot start') : m.fetch?.waiting ? h('small', {class: 'opt'}, ` · ${m.fetch.waiting} waiting`) : null]), cell(m.engine, 'opt mut'), cell(m.need_mib == null ? '–' : `${gib(m.need_mib)} GiB`, 'n'),
    cell(m.levels.length && m.wake_s != null ? sec(m.wake_s) : '', 'n opt'), cell(m.cold_s == null ? '' : sec(m.cold_s), 'n'), cell(used(m), 'opt mut gap'), cell(buttons(m), 'acts'))),
  word ? h('tr', {key: `${m.id}\nword`, class: 'wordrow'}, h('td', {colspan: '8'}, word)) : null];
}

function used(m) {
  if (m.inFlight) return 'now';
  if (m.idle_s != null) return `${sec(m.idle_s)} ago`;
  return m.raw.last_used_s == null ? '' : `${sec(m.raw.last_used_s)} ago`;
}
