/* The playground's requests: an ordinary client of /v1, with the viewer's key. What a wait was made of is kept with the answer. */

import {call, events} from './api.js';
import {put} from './store.js';

const HEADERS = {'Content-Type': 'application/json'};

export const chat = {turns: [], busy: null, tokens: 512, temperature: 0.7, draft: ''};
export const embed = {busy: null, texts: 'The cat sat on the mat\nA kitten rests on a rug\nQuarterly revenue rose', result: null, problem: ''};
export const rerank = {busy: null, query: 'what does sleep level 1 cost', texts: 'Sleep level 1 keeps weights in host RAM\nThe office closes at six\nWake time depends on the size of the weights', result: null, problem: ''};

export const linesOf = text => text.split('\n').map(line => line.trim()).filter(Boolean);

export const bodies = {
  chat: model => ({
    model, messages: [...chat.turns.filter(one => one.text && !one.problem).map(one => ({role: one.role, content: one.text})), ...(chat.draft.trim() ? [{role: 'user', content: chat.draft.trim()}] : [])],
    max_tokens: chat.tokens, temperature: chat.temperature, stream: true, stream_options: {include_usage: true},
  }),
  embed: model => ({model, input: linesOf(embed.texts)}),
  rerank: model => ({model, query: rerank.query, documents: linesOf(rerank.texts)}),
};

export const ROUTES = {chat: 'v1/chat/completions', embed: 'v1/embeddings', rerank: 'v1/rerank'};

// ---- chat

export async function sendChat(model) {
  if (chat.busy || !chat.draft.trim()) return;
  const body = bodies.chat(model);
  const answer = {role: 'assistant', text: '', thought: '', note: 'sent', start: '', waited_s: null, first_s: null, tokens: 0, took_s: null, problem: '', model};
  chat.turns.push({role: 'user', text: chat.draft.trim()}, answer);
  chat.draft = '';
  chat.busy = new AbortController();
  put();
  const began = performance.now();
  const since = () => (performance.now() - began) / 1000;
  try {
    const response = await call(ROUTES.chat, {method: 'POST', headers: {...HEADERS, Accept: 'text/event-stream'}, body: JSON.stringify(body), signal: chat.busy.signal});
    told(answer, response);
    if ((response.headers.get('Content-Type') || '').includes('json')) whole(answer, await response.json());
    else for await (const event of events(response)) piece(answer, event, since);
  } catch (error) {
    answer.problem = chat.busy.signal.aborted ? 'stopped' : error.message;
  }
  answer.took_s = since();
  answer.note = '';
  chat.busy = null;
  put();
}

export const stopChat = () => chat.busy?.abort();

export function clearChat() {
  chat.busy?.abort();
  chat.turns = [];
  put();
}

function told(answer, response) {
  answer.start = response.headers.get('X-Greenroom-Start') || '';
  const waited = response.headers.get('X-Greenroom-Wait-Ms');
  answer.waited_s = waited == null ? null : Number(waited) / 1000;
  answer.note = '';
  put();
}

function whole(answer, value) {
  answer.text = value.choices?.[0]?.message?.content || '';
  answer.tokens = value.usage?.completion_tokens || 0;
}

function piece(answer, event, since) {
  if (event.comment) answer.note = event.comment;
  if (event.data && event.data !== '[DONE]') {
    const value = JSON.parse(event.data);
    if (value.error) throw new Error(value.error.message || 'the engine failed');
    const delta = value.choices?.[0]?.delta || {};
    const thought = delta.reasoning_content || delta.reasoning || '';
    const text = delta.content || value.choices?.[0]?.text || '';
    if (thought || text) {
      answer.first_s ??= since();
      answer.tokens++;
      answer.note = '';
      answer.thought += thought;
      answer.text += text;
    }
    if (value.usage?.completion_tokens) answer.tokens = value.usage.completion_tokens;
  }
  put();
}

// ---- vectors and ranks

export const sendEmbed = model => once(embed, 'embed', model, value => {
  const vectors = value.data.slice().sort((a, b) => a.index - b.index).map(one => one.embedding);
  return {texts: linesOf(embed.texts), size: vectors[0].length, norm: length(vectors[0]), likeness: vectors.map(a => vectors.map(b => dot(a, b) / (length(a) * length(b) || 1)))};
});

export const sendRerank = model => once(rerank, 'rerank', model, value => {
  const texts = linesOf(rerank.texts);
  return {rows: (value.results || []).map(one => ({text: texts[one.index] ?? '', score: one.relevance_score ?? one.score ?? 0})).sort((a, b) => b.score - a.score)};
});

async function once(mine, kind, model, understand) {
  if (mine.busy) return;
  mine.busy = new AbortController();
  mine.problem = '';
  put();
  const began = performance.now();
  try {
    const response = await call(ROUTES[kind], {method: 'POST', headers: HEADERS, body: JSON.stringify(bodies[kind](model)), signal: mine.busy.signal});
    const value = await response.json();
    const waited = response.headers.get('X-Greenroom-Wait-Ms');
    mine.result = {...understand(value), start: response.headers.get('X-Greenroom-Start') || '', waited_s: waited == null ? null : Number(waited) / 1000, took_s: (performance.now() - began) / 1000};
  } catch (error) {
    mine.problem = mine.busy.signal.aborted ? 'stopped' : error.message;
  }
  mine.busy = null;
  put();
}

export const stop = mine => mine.busy?.abort();
const dot = (a, b) => a.reduce((total, value, i) => total + value * b[i], 0);
const length = a => Math.sqrt(dot(a, a));
