/* The three kinds of the playground. */

import {h} from '../paint.js';
import {cell, head, meter} from '../parts.js';
import {chat, clearChat, embed, rerank, sendChat, sendEmbed, sendRerank, stop, stopChat} from '../playground.js';
import {put} from '../store.js';
import {many, percent, sec} from '../words.js';

const isSend = event => event.key === 'Enter' && (event.ctrlKey || event.metaKey);

// ---- chat

export function chatBox(model) {
  const send = () => sendChat(model);
  return h('div', {key: 'chat', class: 'box'}, chat.turns.map(turn),
    h('label', {}, h('span', {class: 'vh'}, 'Message'), h('textarea', {rows: '3', placeholder: 'Ask something. Ctrl+Enter sends.', value: chat.draft, oninput: event => {
      chat.draft = event.target.value;
      put();
    }, onkeydown: event => {
      if (!isSend(event)) return;
      send();
      event.target.value = '';
    }})),
    h('div', {class: 'head'}, chat.busy ? h('button', {key: 'stop', type: 'button', onclick: stopChat}, 'Stop') : h('button', {key: 'send', type: 'button', class: 'go', disabled: !chat.draft.trim(), onclick: send}, 'Send'),
      chat.turns.length ? h('button', {type: 'button', class: 'quiet', onclick: clearChat}, 'New conversation') : null));
}

function turn(one, i) {
  if (one.role === 'user') return h('div', {key: i, class: 'turn me'}, one.text);
  const isBusy = one.took_s == null;
  return h('div', {key: i, class: 'turn', 'aria-busy': String(isBusy)}, one.thought ? h('details', {class: 'thought'}, h('summary', {}, h('span', {class: 'mut'}, 'thinking')), one.thought) : null,
    one.text || (isBusy ? h('span', {class: 'mut'}, one.note === 'sent' ? `Waiting for ${one.model}…` : one.note || 'Waiting for the first token…') : ''),
    one.problem ? h('p', {class: 'bad'}, one.problem) : null, h('small', {}, figures(one)));
}

function figures(one) {
  const parts = [one.start && `start: ${one.start}`, one.waited_s == null ? '' : `waited ${sec(one.waited_s)}`];
  if (one.first_s != null) parts.push(`first token ${sec(Math.max(0, one.first_s - (one.waited_s || 0)))}`);
  if (one.tokens) parts.push(many(one.tokens, 'token'));
  const spent = one.took_s == null || one.first_s == null ? 0 : one.took_s - one.first_s;
  if (spent > 0.05 && one.tokens > 1) parts.push(`${((one.tokens - 1) / spent).toFixed(spent > 1 ? 0 : 1)} tok/s`);
  return parts.filter(Boolean).join(' · ');
}

// ---- embed

const field = (label, rows, mine, name, send) => h('label', {}, label, h('textarea', {rows, value: mine[name], oninput: event => {
  mine[name] = event.target.value;
}, onkeydown: event => {
  if (isSend(event)) send();
}}));

const sender = (mine, send, text) => h('div', {class: 'head'}, mine.busy ? h('button', {key: 'stop', type: 'button', onclick: () => stop(mine)}, 'Stop') : h('button', {key: 'send', type: 'button', class: 'go', onclick: send}, text),
  mine.busy ? h('span', {class: 'mut'}, 'Waiting…') : null);

const spent = result => `${result.start ? ` · start: ${result.start}` : ''}${result.waited_s > 0.05 ? ` · waited ${sec(result.waited_s)}` : ''}`;

export function embedBox(model) {
  const send = () => sendEmbed(model);
  const {result, problem} = embed;
  return h('div', {key: 'embed', class: 'box'}, field('One text a line', '4', embed, 'texts', send), sender(embed, send, 'Embed'),
    problem ? h('p', {class: 'bad'}, problem) : null,
    result ? [h('div', {class: 'wide'}, h('table', {class: 'heat'}, h('caption', {class: 'vh'}, 'Likeness of each pair, 1 = the same'), h('thead', {}, h('tr', {}, h('td', {}), result.texts.map((_, i) => h('th', {scope: 'col'}, i + 1)))),
      h('tbody', {}, result.texts.map((text, i) => h('tr', {key: i}, h('th', {scope: 'row'}, `${i + 1}  ${text}`), result.likeness[i].map(value => h('td', {style: {'--v': `${Math.max(0, value) * 70}%`}}, value.toFixed(2)))))))),
    h('p', {class: 'mut'}, `${many(result.texts.length, 'vector')} of ${result.size.toLocaleString('en')} numbers, norm ${result.norm.toFixed(2)}, in ${sec(result.took_s)}${spent(result)}`)] : null);
}

// ---- rerank

export function rerankBox(model) {
  const send = () => sendRerank(model);
  const {result, problem} = rerank;
  const most = Math.max(1e-9, ...(result?.rows || []).map(one => Math.abs(one.score)));
  return h('div', {key: 'rerank', class: 'box'}, h('label', {}, 'Query', h('input', {class: 'full', value: rerank.query, oninput: event => {
    rerank.query = event.target.value;
  }})), field('One passage a line', '4', rerank, 'texts', send), sender(rerank, send, 'Rank'),
  problem ? h('p', {class: 'bad'}, problem) : null,
  result ? [h('table', {class: 'narrow'}, head([['rank', '', true], ['passage'], ['share of the best', 'opt', true], ['score', 'n']]), h('tbody', {}, result.rows.map((one, i) =>
    h('tr', {key: i}, cell(i + 1, 'mut'), h('td', {class: 'wrap'}, one.text), cell(meter(Math.max(0, one.score) / most, null, `score ${percent(Math.max(0, one.score) / most)} of the best`), 'opt third'), cell(one.score.toFixed(2), 'n'))))),
  h('p', {class: 'mut'}, `${many(result.rows.length, 'passage')} in ${sec(result.took_s)}${spent(result)}`)] : null);
}
