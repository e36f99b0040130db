/* The engine's own words, live. It follows the end as long as one does not scroll away from it. */

import {copy} from '../copy.js';
import {logOf} from '../follow.js';
import {h} from '../paint.js';
import {put, ui} from '../store.js';

const SHOWN_MAX = 400;
let wanted = '';

export function log(m) {
  const told = logOf(m.id);
  const all = told.lines.map((line, i) => [told.first + i, line]);
  const lines = (wanted ? all.filter(([, line]) => line.toLowerCase().includes(wanted.toLowerCase())) : all).slice(-SHOWN_MAX);
  const text = () => lines.map(([, line]) => line).join('\n');
  requestAnimationFrame(follow);
  return h('section', {key: 'log', class: 'full'}, h('div', {class: 'head'}, h('h2', {}, 'Log'),
    h('input', {type: 'search', placeholder: 'Filter', 'aria-label': 'Filter the log', value: wanted, oninput: event => {
      wanted = event.target.value;
      put();
    }}), h('span', {class: 'mut'}, ui.held ? 'held' : told.note), h('div', {class: 'acts'},
      h('button', {type: 'button', class: 'quiet', onclick: event => copy(text(), event.target)}, 'Copy'),
      h('button', {type: 'button', class: 'quiet', onclick: () => download(m.id, text())}, 'Download'))),
  h('div', {class: 'log', id: 'log', key: `log\n${m.id}`, role: 'log', 'aria-live': 'off', tabindex: '0', 'aria-label': `Log of ${m.id}`},
    lines.length ? lines.map(([number, line]) => h('div', {key: number}, line || ' ')) : h('div', {class: 'mut'}, wanted ? `No line has “${wanted}”.` : 'Nothing yet.')));
}

/** Stays at the end if that is where it was. */
function follow() {
  const box = document.getElementById('log');
  if (!box || box.scrollHeight === box._height) return;
  if (!box._height || box.scrollTop + box.clientHeight > box._height - 40) box.scrollTop = box.scrollHeight;
  box._height = box.scrollHeight;
}

function download(id, text) {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([text], {type: 'text/plain'}));
  link.download = `${id.replace(/[^A-Za-z0-9._-]+/g, '_').slice(0, 80)}.log`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
