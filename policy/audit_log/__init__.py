"""The audit log as bytes: events, chain, Merkle trees and write-ahead records."""
