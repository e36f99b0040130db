/* Beside the picture: who waits and why, how it came to that, what would help, what just happened. */

import {cancelButton} from '../acts.js';
import {ensureStory, readStory} from '../live.js';
import {h} from '../paint.js';
import {glyph, nameOf, select, storyOf} from '../parts.js';
import {pictureAge, put, serverNow, store, ui} from '../store.js';
import {about, ended, moment, sec} from '../words.js';
import {entry as filesEntry} from './files.js';

const WAITERS_MAX = 4;
const EVENTS_SHOWN = 9;
const EXPLAINED_MAX = 40; // models to choose from: those that something happened to

export function aside(picture) {
  return h('aside', {class: 'side', 'aria-label': 'Queue, reasons and events'}, queue(picture), why(picture), advice(picture), justNow());
}

function queue(picture) {
  return h('section', {class: 'q', key: 'queue'}, h('header', {}, h('h2', {}, 'Queue'), h('small', {}, picture.waiting ? `${picture.waiting} waiting` : 'empty')),
    picture.queue.length || picture.late.length ? [picture.queue.map(entry), picture.late.map(filesEntry)] : h('p', {class: 'mut'}, 'Everyone is served at once.'));
}

function entry(one) {
  const {m} = one;
  const eta = one.eta_s ?? m.eta_s;
  const left = eta == null ? null : eta - pictureAge();
  return h('div', {class: 'wait', key: one.model, 'data-m': one.model},
    h('h3', {class: `s-${m.state}`}, glyph(m.state), nameOf(one.model), h('em', {}, left == null ? '' : left > 0.5 ? about(Math.max(1, Math.round(left))) : h('small', {}, 'longer than usual'))),
    h('p', {}, `${m.queued} waiting. `, reason(one)),
    one.stages.length ? stages(one.stages) : null,
    one.requests.length ? waiters(one) : m.oldest_s ? h('p', {class: 'mut'}, `The first has waited ${sec(m.oldest_s + pictureAge())}.`) : null);
}

/** The core's own sentence; where the queue has none, the last one of the model's story. */
function reason(one) {
  if (one.reason) return one.reason;
  const told = store.stories[one.model];
  ensureStory(one.model, true);
  const last = told?.story?.at(-1);
  return last ? ended(last.text) : '';
}

function stages(list) {
  const now = list.findIndex(one => (one.fraction ?? 0) < 1);
  return h('div', {class: 'eta', role: 'img', 'aria-label': list.map((one, i) => `${one.name} ${i < now || now < 0 ? 'done' : about(one.expected_s)}`).join(', ')},
    list.map((one, i) => h('i', {
      class: now < 0 || i < now ? 'done' : i === now ? 'now' : '', title: `${one.name}, ${about(one.expected_s)}`,
      style: {flex: `${Math.max(one.expected_s || 1, 2)} 1 0`, '--d': `${Math.min(100, (one.fraction || 0) * 100)}%`},
    }, h('span', {}, one.name))));
}

function waiters(one) {
  const longest = Math.max(30, ...one.requests.map(each => each.age_s));
  const rest = one.requests.length - WAITERS_MAX;
  return [h('div', {class: 'ages'}, one.requests.slice(0, WAITERS_MAX).map(each => {
    const age = each.age_s + pictureAge();
    return [h('span', {}, sec(age)), h('span', {class: 'meter'}, h('i', {style: {width: `${Math.min(100, age / longest * 100)}%`}})),
      h('span', {class: 'who'}, each.key || '', each.class === 'batch' ? ' batch' : ''), cancelButton({...each, model: one.model})];
  })), rest > 0 ? h('a', {class: 'mut', href: `#/requests?tab=open&model=${encodeURIComponent(one.model)}`}, `and ${rest} more`) : null];
}

// ---- why

function why(picture) {
  const known = [...new Set([...picture.queue.map(one => one.model), ...store.events.map(one => one.model), ...picture.models.filter(one => one.instances.length).map(one => one.id)])]
    .filter(id => picture.byId.has(id)).slice(0, EXPLAINED_MAX);
  if (!known.length) return null;
  const id = known.includes(ui.explain) ? ui.explain : known[0];
  const m = picture.byId.get(id);
  ensureStory(id, !!m.queued || m.inFlight > 0 || m.leaving || !!m.fetch || m.state === 'starting' || m.state === 'waking');
  return h('section', {key: 'why'}, h('header', {}, h('h2', {}, 'Why'), select('Model to explain', known.map(one => [one, one]), id, value => {
    ui.explain = value;
    readStory(value);
    put();
  })), storyOf(tail(store.stories[id]), at => moment(at, serverNow())));
}

const tail = told => (told?.story ? {...told, story: told.story.slice(-5)} : told);

// ---- advice, events

function advice(picture) {
  if (!picture.headline?.text) return null;
  return h('section', {key: 'advice'}, h('header', {}, h('h2', {}, 'Advice'), h('a', {href: '#/advice', class: 'mut'}, 'open')), h('p', {}, ended(picture.headline.text)));
}

function justNow() {
  return h('section', {key: 'now'}, h('header', {}, h('h2', {}, 'Just now')), store.events.length
    ? h('dl', {class: 'story tight'}, store.events.slice(0, EVENTS_SHOWN).map(one => [
      h('dt', {key: `t${one.id}`}, h('time', {}, moment(one.at, serverNow()))),
      h('dd', {key: `d${one.id}`, class: one.level === 'error' ? 'bad' : one.level === 'warning' ? 'warn' : '', 'data-m': one.model}, one.model && !one.text.startsWith(one.model) ? [h('b', {}, one.model), ' '] : null, one.text)]))
    : h('p', {class: 'mut'}, 'Nothing has happened since the server started.'));
}
