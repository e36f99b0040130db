/* Playground: try a model, and see what the wait was made of. Nothing is sent before the button is pressed. */

import {jsonOrNull} from '../api.js';
import {copy} from '../copy.js';
import {h} from '../paint.js';
import {choice, select} from '../parts.js';
import {bodies, chat, ROUTES} from '../playground.js';
import {may, put, setQuery, store, ui} from '../store.js';
import {about, many} from '../words.js';
import {arrival} from './files.js';
import {chatBox, embedBox, rerankBox} from './play_boxes.js';

const KINDS = [['chat', 'chat'], ['embed', 'embed'], ['rerank', 'rerank']];
const HINTS = {rerank: /rerank/i, embed: /embed|bge|e5|gte|minilm/i};
const BOXES = {chat: chatBox, embed: embedBox, rerank: rerankBox};

let listed; // names from /v1/models, for a key that may not look ...
let listedFor; // ... and for whom that was asked

export function play(picture, {query}) {
  const kind = BOXES[query.get('kind')] ? query.get('kind') : 'chat';
  const isEarly = !picture && store.link === 'connecting'; // what a model is about to do is not known yet
  const names = picture ? [...picture.models.map(one => one.id), ...elsewhere(picture)] : isEarly ? [] : namesAlone();
  if (!names.length) return h('div', {class: 'pad'}, h('h1', {}, 'Playground'), h('p', {class: 'mut'}, isEarly || (listed === undefined && !picture) ? 'Reading…' : 'No model can be called with this key.'));
  const asked = query.get('model');
  const model = names.includes(asked) ? asked : likely(names, kind);
  return h('div', {class: 'pad'}, h('h1', {}, 'Playground'),
    h('div', {class: 'tools'}, choice('Kind', KINDS, kind, value => setQuery('kind', value === 'chat' ? '' : value))),
    h('div', {class: 'play'}, h('div', {},
      h('label', {}, 'Model', select('Model', names.map(one => [one, one]), model, value => setQuery('model', value))),
      kind === 'chat' ? knobs() : null, h('p', {class: 'mut expect'}, may('inference') ? expectation(picture?.byId.get(model), picture, model) : 'Your key may look, not call models: this would be refused.')),
    h('div', {}, BOXES[kind](model), request(kind, model))));
}

/** Models that only peers have, under the names by which this server passes requests on. */
function elsewhere(picture) {
  const here = new Set(picture.models.flatMap(one => [one.id, ...one.aliases]));
  return [...new Set(picture.peers.flatMap(one => one.models || []))].filter(name => !here.has(name));
}

function namesAlone() {
  if (listedFor !== store.me) {
    const mine = listedFor = store.me;
    listed = undefined;
    const take = names => {
      if (mine !== listedFor) return;
      listed = names;
      put();
    };
    jsonOrNull('v1/models').then(value => take((value?.data || []).map(one => one.id)), () => take([]));
  }
  return listed || [];
}

/** By the name alone; the user knows better. */
function likely(names, kind) {
  const fits = name => (HINTS[kind] ? HINTS[kind].test(name) : !HINTS.rerank.test(name) && !HINTS.embed.test(name));
  const ready = store.picture?.models.find(one => one.state === 'ready' && fits(one.id));
  return ready?.id ?? names.find(fits) ?? names[0];
}

function knobs() {
  const field = (text, name, props) => h('label', {}, text, h('input', {type: 'number', value: String(chat[name]), oninput: event => {
    const value = Number(event.target.value);
    if (event.target.value && isFinite(value)) chat[name] = value;
  }, ...props}));
  return [field('Longest answer, tokens', 'tokens', {min: '1', max: '100000'}), field('Temperature', 'temperature', {min: '0', max: '2', step: '0.1'})];
}

/** What will happen when the request is sent. */
function expectation(m, picture, name) {
  if (!m) return `${passedOn(picture?.peers.filter(one => one.models?.includes(name)) || [])}This counts as a request of your key.`;
  if (m.absent) return `Its files are not on this host: ${m.fetch ? `${arrival(m)}. This waits for them` : 'sending this fetches them first, and waits'}; then it starts like any other.`;
  const wait = about(m.eta_s ?? (m.state === 'asleep' ? m.wake_s : m.cold_s));
  if (m.blocked) return `It cannot start as things are: ${m.blocked}.`;
  if (m.state === 'ready') return m.queued ? `Busy: ${many(m.queued, 'request')} wait before yours.` : 'Ready. It answers at once.';
  const now = m.state === 'asleep' ? 'is asleep' : m.state === 'stopped' || m.state === 'failed' ? 'is not loaded' : 'is on its way';
  return `${m.id} ${now}; a first answer takes ${wait || 'a while'} now. Sending this puts it in the queue like any other client, and others may have to make room.`;
}

function passedOn(having) {
  if (!having.length) return '';
  const well = having.filter(one => one.healthy);
  return well.length ? `Another server answers: ${well.map(one => one.id).join(' or ')}. ` : `Only ${having.map(one => one.id).join(' and ')} ${having.length === 1 ? 'has it, and does' : 'have it, and do'} not answer now. `;
}

function request(kind, model) {
  const body = bodies[kind](model);
  const curl = () => `curl -sS ${new URL(`../${ROUTES[kind]}`, document.baseURI).href} -H 'Content-Type: application/json' ${store.me?.key_name ? '-H "Authorization: Bearer $GREENROOM_API_KEY" ' : ''}-d '${JSON.stringify(body).replaceAll("'", "'\\''")}'`;
  return [h('div', {key: 'more', class: 'head more'}, h('button', {type: 'button', class: 'quiet', 'aria-expanded': String(!!ui.open.request), onclick: () => {
    ui.open.request = !ui.open.request;
    put();
  }}, ui.open.request ? 'Hide request' : 'Show request'), h('button', {type: 'button', class: 'quiet', onclick: event => copy(curl(), event.target)}, 'Copy as curl')),
  ui.open.request ? h('pre', {key: 'body', class: 'body', tabindex: '0', 'aria-label': 'Request'}, `POST /${ROUTES[kind]}\n\n${JSON.stringify(body, null, 2)}`) : null];
}
