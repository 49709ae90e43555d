"""Names and loopback connections, as an agent with a network asks for them. The lists at the end may be refused."""

import asyncio
import socket
import threading

for name, family, flags in (("localhost", 0, 0), ("two.example", 0, socket.AI_ADDRCONFIG), ("two.example", 2, 0)):
    found = socket.getaddrinfo(name, 80, family, socket.SOCK_STREAM, 0, flags)
    print(len(found), sorted({entry[4][0] for entry in found}))
try:
    socket.getaddrinfo("nosuch.example", 80)
except socket.gaierror as error:
    print("gaierror", error.errno == socket.EAI_AGAIN)

server = socket.create_server(("127.0.0.1", 0))
answering = threading.Thread(target=lambda: server.accept()[0].sendall(b"hello"))
answering.start()
with socket.create_connection(server.getsockname(), timeout=5) as client:
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    print(client.recv(5).decode())
answering.join()


async def talk() -> bytes:
    listening = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
    heard = await reader.read()
    writer.close()
    listening.close()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(asyncio.DatagramProtocol, local_addr=("127.0.0.1", 0))
    transport.close()
    return heard


assert asyncio.run(talk()) == b""
try:
    socket.if_nameindex()
    print("list of interfaces")
except PermissionError:
    print("no list of interfaces")
print("done")
