// Package network is what stores at the other end of a network have in common, and knows none of them: the hosts and the certificates that
// a URL names, and what an error of a connection means whichever library it comes from.
//
// Errors are judged by their types in packages net, crypto/tls and crypto/x509 and by nothing else. What a library hides in a text, and what
// a server says, is the matter of its store.
package network
