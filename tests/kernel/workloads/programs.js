// Started programs, as an agent with an executables grant starts them.
'use strict';
const { execFile, spawnSync } = require('node:child_process');

console.log(spawnSync('/usr/bin/echo', ['one']).stdout.toString().trim());
execFile('/usr/bin/echo', ['two'], (_, answer) => console.log(`${answer}done`));
