/* When there is nothing to show, why, and what to do about it. */

import {useKey, hasKey} from '../api.js';
import {copy} from '../copy.js';
import {reconnect} from '../live.js';
import {h} from '../paint.js';
import {blank} from '../parts.js';
import {put, store} from '../store.js';
import {device} from '../bar.js';
import {clock, many} from '../words.js';

const EXAMPLE = 'models:\n  chat:\n    cmd: llama-server --model /models/chat.gguf --port ${PORT}';

export const loading = () => h('div', {class: 'blank', 'aria-busy': 'true'}, h('h1', {}, store.link === 'lost' ? 'No answer yet' : 'Looking…'),
  h('p', {}, store.link === 'lost' ? 'The server does not answer. This page tries again by itself, and at once with the button.' : 'Asking the server who is on stage.'),
  store.link === 'lost' ? h('button', {type: 'button', class: 'go', onclick: reconnect}, 'Try now') : null);

export function empty(picture) {
  const cards = picture.cards.filter(one => !one.isRam).length;
  const found = cards ? `${many(cards, 'device')} found` : 'No GPU found; host RAM is there';
  return h('div', {class: 'blank'}, h('div', {class: 'blank-bars', 'aria-hidden': 'true'}, picture.cards.slice(0, 2).map(one => device(one, picture))),
    h('h1', {}, 'The stage is empty'),
    h('p', {}, `${found}, no model configured. Add one to greenroom.yaml and reload.`),
    h('pre', {tabindex: '0'}, EXAMPLE),
    h('p', {}, 'Or try it without a GPU and without weights: ', h('code', {}, 'greenroom demo')),
    h('button', {type: 'button', class: 'go', onclick: event => copy(EXAMPLE, event.target)}, 'Copy the example'));
}

export function failing() {
  const {problem} = store;
  const details = `GET /api/status: ${problem?.status ?? 'no answer'}\n${problem?.message ?? ''}`;
  return blank('The control plane failed to answer',
    h('p', {}, `Asked at ${clock(store.lostAt)}. Requests to models are a separate path and may well be served.`),
    h('pre', {tabindex: '0'}, details),
    h('p', {}, 'This page tries again by itself.'),
    h('div', {class: 'head'}, h('button', {type: 'button', class: 'go', onclick: reconnect}, 'Try now'),
      h('button', {type: 'button', onclick: event => copy(details, event.target)}, 'Copy details')));
}

/** A key that is missing, wrong, or may call models only. */
export function denied() {
  const {me, problem} = store;
  const known = me?.key_name;
  const take = event => {
    event.preventDefault();
    const field = event.target.elements.namedItem('key');
    useKey(field.value.trim());
    field.value = '';
    put({me: null, link: 'connecting', problem: null, picture: null});
    reconnect();
  };
  return blank(known ? 'This key may call models, not watch them' : problem?.status === 401 ? 'This server asks for a key' : 'Not with this key',
    h('p', {}, known ? `Key ${known} has the scope ${(me.scopes || []).join(', ') || 'nothing'}. The dashboard needs view; buttons need admin.` : problem?.message || ''),
    h('p', {}, 'The operator grants it in greenroom.yaml, or you can use another key; it stays in this tab only.',
      known ? [' The ', h('a', {href: '#/play'}, h('b', {}, 'Playground')), ' is open to you as it is.'] : null),
    h('form', {class: 'head', onsubmit: take}, h('label', {}, h('span', {class: 'vh'}, 'API key'), h('input', {name: 'key', type: 'password', placeholder: 'API key', autocomplete: 'off', required: true})),
      h('button', {class: 'go'}, 'Use this key'),
      hasKey() ? h('button', {type: 'button', class: 'quiet', onclick: () => {
        useKey('');
        put({me: null, link: 'connecting', problem: null});
        reconnect();
      }}, 'Forget the key of this tab') : null));
}
