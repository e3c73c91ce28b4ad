"""--capture: record the control plane of this process without changing it.

One JSON line a message: `dir` (send, recv), `peer` (where it was sent; for a
received one the address it came in at, since a PULL socket does not know its
sender), `frames_hex`, `t`, `who`.  HTTP exchanges have `kind` "http".
"""
import json
import os
import time


def start(path, who):
    import requests
    import zmq.sugar.socket as zs

    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    addresses = {}  # id of a socket -> where it was last bound or connected

    def record(**fields):
        # one write of one line: the ranks of a role may share the file
        os.write(fd, (json.dumps({"t": round(time.time(), 6), "who": who, **fields}) + "\n").encode())

    def record_zmq(direction, socket, parts):
        peer = addresses.get(id(socket), "")
        if peer.startswith("tcp"):
            record(kind="zmq", dir=direction, peer=peer, frames_hex=[bytes(p).hex() for p in parts])

    def remember(name):
        original = getattr(zs.Socket, name)

        def call(self, address):
            result = original(self, address)
            addresses[id(self)] = self.last_endpoint.decode().rstrip("\0") if name == "bind" else address
            return result

        setattr(zs.Socket, name, call)

    remember("bind"), remember("connect")
    send_multipart, recv_multipart, http_send = zs.Socket.send_multipart, zs.Socket.recv_multipart, requests.Session.send

    def send(self, parts, *args, **kw):
        record_zmq("send", self, parts)
        return send_multipart(self, parts, *args, **kw)

    def recv(self, *args, **kw):
        parts = recv_multipart(self, *args, **kw)
        record_zmq("recv", self, parts)
        return parts

    def session_send(self, request, **kw):
        response = http_send(self, request, **kw)
        body = request.body.encode() if isinstance(request.body, str) else request.body
        record(kind="http", dir="send", peer=request.url, method=request.method, url=request.url,
               req_headers=dict(request.headers), req_body=body.decode() if body else None,
               status=response.status_code, resp_headers=dict(response.headers), resp_body=response.text)
        return response

    zs.Socket.send_multipart, zs.Socket.recv_multipart = send, recv
    requests.Session.send = session_send
