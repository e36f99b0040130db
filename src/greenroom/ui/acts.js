/* What the buttons do. A button says that its request was sent until the server confirms; nothing is assumed.
   A question comes first when requests would be cut, somebody else would have to leave, or memory is given up. */

import {call, path, Refusal} from './api.js';
import {announce} from './announce.js';
import {ask} from './ask.js';
import {h} from './paint.js';
import {gib, many, sec} from './words.js';
import {lockedBecause, put, store} from './store.js';
import {refresh} from './live.js';

const SAID_MS = 20_000; // how long a refusal stays beside its button
const pending = new Map(); // model -> verb under way
const said = new Map(); // model -> {text, isBad}

export const VERBS = {load: 'Load', wake: 'Wake', sleep: 'Sleep', unload: 'Unload', pin: 'Pin', unpin: 'Unpin', fetch: 'Fetch now', stop: 'Stop fetching'};
const ROUTES = {fetch: 'load', stop: 'unload'}; // of verbs that the server knows under another name
const ASKED = {load: 'loading', wake: 'waking', sleep: 'going to sleep', unload: 'unloading', pin: 'pinning', unpin: 'unpinning', fetch: 'fetching', stop: 'no more fetching'};

/** A button for a model. */
export function button(m, verb, cls = 'quiet') {
  const locked = lockedBecause();
  const mine = pending.get(m.id) === verb;
  return h('button', {
    key: verb, type: 'button', class: cls, 'aria-label': mine ? `${VERBS[verb]} ${m.id}: sent` : `${VERBS[verb]} ${m.id}`, 'data-verb': verb,
    disabled: !!locked || pending.has(m.id), title: locked || null, onclick: () => want(m.id, verb),
  }, mine ? 'Sent…' : VERBS[verb]);
}

/** What makes sense in a model's state, the likeliest first. */
export function verbsFor(m) {
  if (m.absent) return [m.fetch ? 'stop' : 'fetch'];
  if (m.state === 'stopped' || m.state === 'failed') return ['load'];
  if (m.state === 'asleep') return ['wake', 'unload'];
  if (m.state === 'ready' && m.levels.length) return ['sleep', 'unload'];
  return ['unload'];
}

export const buttons = m => verbsFor(m).map(verb => button(m, verb));

/** The server's sentence about the last wish for a model. */
export function wordFor(id) {
  const word = said.get(id);
  return word ? h('p', {class: `word ${word.isBad ? 'bad' : 'mut'}`, role: 'status'}, word.text) : null;
}

function want(id, verb) {
  if (pending.has(id)) return;
  const question = questions[verb]?.(id);
  if (question) ask({...question, isMoot: () => isMoot(id, verb)});
  else send(id, verb);
}

/** The state moved on while the question stood: there is nothing left to do. */
function isMoot(id, verb) {
  const m = store.picture?.byId.get(id);
  if (!m) return `${id} is not in the configuration any more.`;
  if (verb === 'stop' && !m.fetch) return m.absent ? `The fetch of ${id} has ended.` : `${id} is here already.`;
  if (verb === 'sleep' && m.state === 'asleep') return `${id} is asleep already.`;
  if (verb === 'unload' && (m.state === 'stopped' || m.state === 'failed')) return `${id} is not loaded any more.`;
  if ((verb === 'load' || verb === 'wake') && m.state === 'ready') return `${id} is ready already.`;
  return '';
}

export async function send(id, verb, query = '') {
  if (pending.has(id)) return;
  pending.set(id, verb);
  said.delete(id);
  put();
  let word;
  try {
    const response = await call(path(id, `/${ROUTES[verb] || verb}${query}`), {method: 'POST'});
    const answer = await response.json();
    word = {text: answer.message || `${ASKED[verb]} ${id}`, isBad: false};
  } catch (error) {
    word = {text: error instanceof Refusal ? error.message : 'No answer: the connection broke. Look at the state before you try again.', isBad: true};
  }
  pending.delete(id);
  said.set(id, word);
  setTimeout(() => {
    if (said.get(id) === word) {
      said.delete(id);
      put();
    }
  }, SAID_MS);
  announce(word.text);
  put();
  refresh();
}

// ---- questions

const questions = {
  sleep: id => leaving(id, 'sleep'),
  unload: id => leaving(id, 'unload'),
  load: id => arriving(id, 'load'),
  wake: id => arriving(id, 'wake'),
  stop: id => abandoning(id),
};

function leaving(id, verb) {
  const title = `${VERBS[verb]} ${id}?`;
  const of = () => store.picture.byId.get(id);
  const body = () => {
    const m = of();
    if (!m) return [];
    const back = verb === 'sleep' ? m.wake_s : m.cold_s;
    return [
      m.inFlight ? `${many(m.inFlight, 'request')} ${m.inFlight === 1 ? 'is' : 'are'} running; new ones will wait.` : 'Nothing is running on it.',
      m.queued ? `${many(m.queued, 'request')} wait for it and will bring it back.` : '',
      back == null ? '' : `The next request ${verb === 'sleep' ? 'wakes' : 'starts'} it again in about ${sec(back)}.`,
    ];
  };
  const choices = () => {
    const busy = of()?.inFlight || 0;
    const cut = busy && verb === 'unload' ? [[`Cut off ${many(busy, 'request')}`, 'risk', () => send(id, verb, '?force=1')]] : [];
    return [...cut, [busy ? `${VERBS[verb]} when they finish` : VERBS[verb], 'go', () => send(id, verb)]];
  };
  return {title, body, choices};
}

/** Only where somebody waits for it: what has come is kept. */
function abandoning(id) {
  const waiting = () => store.picture?.byId.get(id)?.fetch?.waiting || 0;
  if (!waiting()) return null;
  return {
    title: `Stop fetching ${id}?`,
    body: () => [`${many(waiting(), 'request')} ${waiting() === 1 ? 'waits' : 'wait'} for it and will be refused.`, 'What has come is kept: the next fetch goes on from there.'],
    choices: () => [[waiting() ? `Stop and refuse ${many(waiting(), 'request')}` : 'Stop fetching', 'risk', () => send(id, 'stop')]],
  };
}

function arriving(id, verb) {
  const m = store.picture?.byId.get(id);
  const missing = m ? shortage(m) : 0;
  if (!missing) return null;
  const told = store.picture.queue.find(one => one.model === id)?.victims;
  const who = told?.length ? `${told.map(one => one.model || one).join(', ')} will have to leave.` : 'Others will have to leave: idle ones, those that are quickest to bring back.';
  return {
    title: `${VERBS[verb]} ${id} now?`,
    body: () => [`It needs ${gib(m.need_mib)} GiB, ${gib(missing)} GiB more than is free. ${who}`, 'Running requests are allowed to finish.'],
    choices: () => [[`${VERBS[verb]} it`, 'go', () => send(id, verb)]],
  };
}

/** MiB that are missing on the device with the most room; 0 = it fits, or nobody can tell. */
function shortage(m) {
  if (m.need_mib == null) return 0;
  const asked = m.raw.devices?.length ? m.raw.devices : null;
  const rooms = store.picture.cards.filter(one => !asked || asked.includes(one.id)).map(one => {
    const held = one.pieces.find(piece => piece.model.id === m.id)?.size || 0;
    return one.capacity_mib - one.headroom_mib - one.outside_mib - (one.reserved_mib || 0) + held;
  });
  return rooms.length ? Math.max(0, m.need_mib - Math.max(...rooms)) : 0;
}

// ---- requests

const cancelling = new Set();

export function cancelButton(request) {
  const locked = lockedBecause();
  const sent = cancelling.has(request.id);
  return h('button', {
    type: 'button', class: 'quiet', 'aria-label': `Cancel request ${request.id} for ${request.model}`, disabled: !!locked || sent, title: locked || null,
    onclick: () => askCancel(request),
  }, sent ? 'Sent…' : 'Cancel');
}

function askCancel(request) {
  const age = request.age_s == null ? '' : ` for ${sec(request.age_s)}`;
  ask({
    title: `Cancel request ${request.id}?`,
    body: () => [`${request.model}${request.key ? `, key ${request.key}` : ''}: ${request.outcome || 'waiting'}${age}.`,
      'Its client gets an error at once, never a short answer that looks complete. The others keep their place.'],
    choices: () => [['Cancel the request', 'risk', () => cancel(request)]],
  });
}

async function cancel(request) {
  if (cancelling.has(request.id)) return;
  cancelling.add(request.id);
  put();
  try {
    await call(`api/requests/${encodeURIComponent(request.id)}`, {method: 'DELETE'});
    announce(`Cancelled request ${request.id}`);
  } catch (error) {
    cancelling.delete(request.id);
    const text = error.status === 404 ? 'It has ended already.' : error.message;
    announce(text);
    ask({title: 'Not cancelled', body: () => [text], choices: () => []});
  }
  put();
  refresh();
}
