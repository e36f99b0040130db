/* Requests: where the time of each went, and the one thing that can be done about it. */

import {cancelButton} from '../acts.js';
import {h, lazy} from '../paint.js';
import {cell, choice, head, legend, nameOf, select, stack, unavailable} from '../parts.js';
import {put, serverNow, setQuery, store, ui} from '../store.js';
import {grown, isOpen, readOlder, rowsOf} from '../requests.js';
import {CAUSES, moment, sec, sum} from '../words.js';

const TABS = [['', 'all'], ['open', 'open'], ['slow', 'waited > 1 s'], ['failed', 'failed']];
const HEADINGS = scale => [['came'], ['model'], ['client', 'opt'], [`time spent, 0 to ${sec(scale)}`, 'bd'], ['waited', 'n'], ['total', 'n opt'], ['tokens in / out', 'n opt'], ['start', 'opt gap'], ['before it', 'opt'], ['outcome'], ['actions', 'acts', true]];
const OUTCOMES = {client_gone: 'client left', engine_broke: 'engine broke', cut: 'cut off'};
const GOOD = new Set(['ok', 'client_gone', 'client left']);
const AT_TOP_PX = 120;
const SCALES = [1, 2, 3, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600, 900, 1800, 3600];

let shown = {filter: null, ids: null, oldest: 0}; // the rows that may stand there while the pointer rests on them

export function requests(picture, {query}) {
  const tab = query.get('tab') || '';
  const model = query.get('model') || '';
  const filter = new URLSearchParams({...(model ? {model} : {}), ...(tab === 'slow' ? {waited_over: '1'} : {}), ...(tab === 'open' || tab === 'failed' ? {outcome: tab} : {})}).toString();
  const told = rowsOf(filter);
  if (told.isMissing) return h('div', {class: 'pad'}, h('h1', {}, 'Requests'), notYet(picture));
  const matching = told.rows.map(one => grown(one, told.readAt)).filter(one => fits(one, tab));
  const {list, later} = steady(matching, filter);
  const scale = scaleOf(list.reduce((most, one) => Math.max(most, sum(one.parts)), 1));
  const today = new Date(serverNow() * 1000).toDateString(); // what ended stays as it is painted, until a day is over
  return h('div', {class: 'pad'}, h('h1', {}, 'Requests'), tools(picture, tab, model, list.length),
    later ? h('button', {type: 'button', class: 'newer', onclick: showLater}, later === 1 ? '1 new request' : `${later} new requests`) : null,
    told.problem ? h('p', {class: 'bad said'}, told.problem) : null,
    list.length ? h('table', {class: 'reqs'}, h('caption', {class: 'vh'}, 'Requests, open ones first'), head(HEADINGS(scale)), h('tbody', {}, list.map(one => (isOpen(one) ? row(one, scale) : lazy(one.id, [one, scale, today], () => row(one, scale)))))) : none(told, tab, model),
    told.cursor && list.length ? h('button', {type: 'button', class: 'quiet', disabled: told.isReading, onclick: readOlder}, 'Show older ones') : null);
}

function fits(one, tab) {
  if (tab === 'open') return isOpen(one);
  if (tab === 'slow') return one.waited > 1;
  if (tab === 'failed') return !isOpen(one) && !GOOD.has(one.outcome);
  return !ui.find || [one.model, one.key, one.id].some(text => String(text).toLowerCase().includes(ui.find.toLowerCase()));
}

/** A length that does not change with every second of the longest one. */
const scaleOf = s => SCALES.find(one => one >= s) || Math.ceil(s / 3600) * 3600;

/** New rows come in on top only where that moves nothing under the pointer or the reader's eyes. */
function steady(rows, filter) {
  const resting = shown.filter === filter && shown.ids?.size && (scrollY > AT_TOP_PX || document.querySelector('.reqs tbody:hover'));
  if (!resting) {
    shown = {filter, ids: new Map(rows.map((one, i) => [one.id, i])), oldest: rows.at(-1)?.at};
    return {list: rows, later: 0};
  }
  for (const one of rows) if (!shown.ids.has(one.id) && one.at < shown.oldest) shown.ids.set(one.id, shown.ids.size); // asked for: they come below
  const list = rows.filter(one => shown.ids.has(one.id)).sort((a, b) => shown.ids.get(a.id) - shown.ids.get(b.id));
  return {list, later: rows.length - list.length};
}

function showLater() {
  shown = {filter: null, ids: null, oldest: 0};
  scrollTo({top: 0});
  put();
}

function tools(picture, tab, model, count) {
  const names = picture.models.map(one => one.id);
  const options = [['', 'every model'], ...(model && !names.includes(model) ? [[model, model]] : []), ...names.map(one => [one, one])];
  return h('div', {class: 'tools'}, choice('Which requests', TABS, tab, value => setQuery('tab', value)), select('Model', options, model, value => setQuery('model', value)),
    h('span', {class: 'mut'}, `${count} shown`), legend(CAUSES, 'c'));
}

function row(one, scale) {
  const total = sum(one.parts);
  const tokens = one.tokens_in == null && one.tokens_out == null ? '' : `${(one.tokens_in ?? 0).toLocaleString('en')} / ${(one.tokens_out ?? 0).toLocaleString('en')}`;
  const bad = !isOpen(one) && !GOOD.has(one.outcome);
  const outcome = [OUTCOMES[one.outcome] || one.outcome, one.status >= 400 && one.outcome === 'refused' ? ` ${one.status}` : ''];
  return h('tr', {key: one.id, 'data-m': one.model}, cell(moment(one.at, serverNow()), 'mut'), cell(nameOf(one.model)),
    cell([one.key, one.class === 'batch' ? h('small', {}, ' batch') : null], 'opt'), cell(stack(one.parts, scale, 'c', CAUSES), 'bd'),
    cell(one.waited > 0.05 ? sec(one.waited) : '', 'n'), cell(sec(total), 'n opt'), cell(tokens, 'n opt'), cell(one.start || '', 'opt gap'),
    cell(one.before && one.before !== one.model ? one.before : '', 'opt mut before'), cell(h('span', {class: one.outcome === 'ok' ? 'mut' : bad ? 'bad' : '', title: one.error || one.code || null}, outcome), 'out-c'),
    cell(isOpen(one) ? cancelButton({...one, age_s: total}) : '', 'acts'));
}

function none(told, tab, model) {
  if (!told.readAt) return h('p', {class: 'mut'}, 'Reading…');
  const filtered = tab || model || ui.find;
  return h('p', {class: 'mut'}, filtered ? 'No request matches. ' : 'No request has come yet. ', filtered ? h('button', {type: 'button', class: 'quiet', onclick: () => {
    document.getElementById('find').value = ui.find = '';
    setQuery('tab', '');
    setQuery('model', '');
  }}, 'Show all') : h('a', {href: '#/play'}, h('b', {}, 'Try one in the playground')));
}

/** On a server that does not list its requests: those that wait now are known all the same. */
function notYet(picture) {
  const waiting = picture.queue;
  return [unavailable('The list is not available yet.', 'This server does not remember single requests. What waits now:'),
    waiting.length ? h('table', {class: 'even'}, head([['model'], ['waiting', 'n'], ['the first waits since', 'n'], ['expected in', 'n']]), h('tbody', {}, waiting.map(one =>
      h('tr', {key: one.model, 'data-m': one.model}, cell(nameOf(one.model)), cell(one.m.queued, 'n'), cell(sec(one.m.oldest_s), 'n'), cell(sec(one.eta_s ?? one.m.eta_s), 'n')))))
      : h('p', {class: 'mut'}, store.link === 'live' ? 'Nobody.' : '')];
}
