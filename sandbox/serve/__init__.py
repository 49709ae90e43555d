"""The supervisor as a service: one process that accepts, one shim for each connection, and its clients.

    client  -> frames                              light: what `covenant` imports to ask
    main    -> server -> connection -> handlers    root: accept, fork, read the request, do it
                         protocol                  the closed models of what may be asked

A new kind of request takes three lines: a model in ``protocol`` and its entry in ``protocol.KINDS``, a function
``(talk: Conversation, asked: TheModel) -> None`` in a module beside ``runs``, and its entry in ``routes.HANDLERS``.
The function answers once, by ``talk.answer({...})`` or by raising a ``CovenantError``; before that it may send as many
``talk.state(...)`` as it likes. ``talk.caller`` says who asks, as the kernel says it; ``talk.opened()`` opens what
decides (sandbox.supervisor.Supervisor). Clients call ``client.ask(kind, **fields)``.
"""
