// Names and loopback connections, as an agent with a network asks for them.
'use strict';
const dns = require('node:dns'), net = require('node:net'), http = require('node:http'), dgram = require('node:dgram');
(async () => {
  console.log((await dns.promises.lookup('two.example', {all: true})).length);
  try { await dns.promises.resolve4('nosuch.example'); } catch (error) { console.log(error.code); }
  const server = http.createServer((_, answer) => answer.end('hello')).listen(0, '127.0.0.1');
  await new Promise((listening) => server.on('listening', listening));
  const got = await fetch(`http://127.0.0.1:${server.address().port}/`);
  console.log(await got.text());
  server.closeAllConnections(); server.close();
  const socket = dgram.createSocket('udp4');
  await new Promise((bound) => socket.bind(0, '127.0.0.1', bound));
  socket.close(() => console.log('done'));
})();
