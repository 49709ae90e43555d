"""Why an agent may do a thing, or not, read out of its artefacts: ``ask``, and the things that can be asked."""
