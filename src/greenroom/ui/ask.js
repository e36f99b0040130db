/* A question before something is given up. Its figures follow the state while it stands. */

import {h, paint} from './paint.js';
import {onChange} from './store.js';

let open = null;

export function ask(question) {
  open = question;
  const dialog = document.getElementById('ask');
  draw();
  if (!dialog.open) dialog.showModal();
  dialog.querySelector('button')?.focus();
}

function close() {
  document.getElementById('ask').close();
}

function draw() {
  if (!open) return;
  const moot = open.isMoot ? open.isMoot() : '';
  const choices = moot ? [] : open.choices();
  paint(document.getElementById('ask'), [
    h('h2', {id: 'ask-title'}, open.title),
    (moot ? [moot] : open.body()).filter(Boolean).map(text => h('p', {}, text)),
    h('div', {class: 'row'},
      h('button', {key: 'keep', type: 'button', onclick: close}, choices.length ? 'Keep as is' : 'Close'),
      choices.map(([text, cls, act], i) => h('button', {key: `c${i}${cls}`, type: 'button', class: cls, onclick: () => {
        close();
        act();
      }}, text))),
  ]);
}

export function setUp() {
  const dialog = document.getElementById('ask');
  dialog.addEventListener('close', () => {
    open = null;
  });
  dialog.addEventListener('click', event => {
    if (event.target === dialog) close();
  });
  onChange(draw);
}
