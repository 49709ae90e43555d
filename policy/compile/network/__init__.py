"""Network grants compiled to nft text and to plans for the gates."""
