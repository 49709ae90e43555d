"""The supervisor as a service: one process that accepts, one shim for each connection, and its clients.

    client  -> unix_wire                           light: `covenant` imports it to send requests
    main    -> server -> connection -> handlers    root: accept, fork, read the request, do it
                         protocol                  the closed models of the requests

A new kind of request takes three lines: a model in ``protocol`` and its entry in ``protocol.KINDS``, a function
``(session: Session, asked: TheModel) -> None`` in a module beside ``run``, and its entry in ``routes.HANDLERS``. The
function answers once, by ``session.answer({...})`` or by raising a ``CovenantError``. Before that it may send any
number of ``session.state(...)``. ``session.caller`` is the kernel's word for the client, and ``session.opened()`` opens
the supervisor's state and log (sandbox.supervisor.Supervisor). Clients call ``client.ask(kind, **fields)``.
"""
