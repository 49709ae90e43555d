// wordcount: lines, words and characters of the intent's text, and the words that come most often.
// One JSON line in on stdin, one JSON line out on stdout.

"use strict";

const fs = require("node:fs");

const LINE_BYTES = 4 << 20;
const TOP_WORDS = 5;
const SHOWN_CHARACTERS = 40; // a text without spaces is one word, and the answer has a limit

/** The first line of stdin, without its newline. */
function readLine() {
  const chunks = [];
  let total = 0;
  const chunk = Buffer.alloc(1 << 16);
  for (;;) {
    const count = fs.readSync(0, chunk, 0, chunk.length, null);
    const end = chunk.subarray(0, count).indexOf(0x0a);
    chunks.push(Buffer.from(chunk.subarray(0, end < 0 ? count : end)));
    total += count;
    if (count === 0 || end >= 0) return Buffer.concat(chunks).toString("utf8");
    if (total > LINE_BYTES) throw new Error(`the intent is longer than ${LINE_BYTES} bytes`);
  }
}

/** Counts of one text. Characters are code points: an emoji is one, not two. */
function count(text) {
  const words = text.toLowerCase().match(/[\p{L}\p{N}]+(?:['’-][\p{L}\p{N}]+)*/gu) ?? [];
  // A Map, not an object: "constructor" and "__proto__" are words too.
  const times = new Map();
  for (const word of words) times.set(word, (times.get(word) ?? 0) + 1);
  const top = [...times].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1)).slice(0, TOP_WORDS);
  return {
    lines: text === "" ? 0 : text.replace(/\n$/, "").split("\n").length,
    words: words.length,
    characters: [...text].length,
    top,
  };
}

/** A word that fits into an answer. */
function shown(word) {
  const characters = [...word];
  return characters.length <= SHOWN_CHARACTERS ? word : characters.slice(0, SHOWN_CHARACTERS).join("") + "...";
}

/** "1 word", "2 words". */
function plural(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

const { text } = JSON.parse(readLine());
const { lines, words, characters, top } = count(text);
const often = top.map(([word, times]) => `${shown(word)} (${times})`).join(", ");
const answer =
  `${plural(lines, "line")}, ${plural(words, "word")}, ${plural(characters, "character")}` +
  (often ? `; most often: ${often}` : "");
fs.writeSync(1, JSON.stringify({ text: answer, sources: [] }) + "\n");
