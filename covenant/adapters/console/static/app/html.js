// htm over preact: templates without a compiler. Texts become text nodes, never markup.
import htm from "../vendor/htm.js";
import { h } from "../vendor/preact.js";

export const html = htm.bind(h);
